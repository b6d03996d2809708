"""One case of `make bench-sync`: the same weights through our sync and through common methods, on shaped hosts."""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import sync_baselines
from benchmarks.sync_cases import Setup
from benchmarks.sync_hosts import Network, Traffic, inside, wait_for_quiet
from benchmarks.sync_probe import CpuSpare, Verdict, plain_rates, small_bucket
from launch.coefficients.sync import SyncCoefficients
from launch.fabric.choose import SyncPrediction
from launch.planner.seats.local import place_cpu
from launch.ports import FIRST, Ports
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.sync_bench.members import Member, Members, together
from megatron_rl.sync_bench.rates import Rates
from megatron_rl.sync_bench.world import PRELOAD, TORCH_NAMES, World, start_world
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.plan.manifest import SyncManifest, build_manifest
from megatron_rl.weight_sync.protocol import SyncReport

PLAIN_SECONDS = 1.5
"""Duration of the plain transfer at the NIC rate."""
RUNS = 3
"""Measured runs of our sync and of each common method."""


@dataclass
class Measured:
    """The measurements of one case."""

    setup: Setup
    prediction: SyncPrediction
    """With this machine's rates. Its route was measured; `floor_s` is the bound."""
    predicted_s: float = 0.0
    """Predicted time of the route, chunk by chunk."""
    manifest: SyncManifest = field(init=False)
    ours: SyncReport = field(init=False)
    nics: tuple[Traffic, ...] = ()
    """Bytes carried by each host's NIC in our sync."""
    runs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """ours, gather, tensors, buckets, ring -> seconds of each run. The last three include the gather."""
    verdict: Verdict = field(init=False)

    @property
    def seconds(self) -> dict[str, float]:
        """The median of the runs."""
        return {name: statistics.median(seconds) for name, seconds in self.runs.items()}

    @property
    def bound_s(self) -> float:
        return self.prediction.floor_s


def coefficients(rates: Rates, rate_share: float, chunk_s: float, processes: int, cores: int) -> SyncCoefficients:
    """This machine's coefficients for the simulator. Processes take turns on the cores.

    Args:
        rate_share: share of the NIC rate that a plain transfer reaches.
        chunk_s: cost of a bucket besides its bytes.
    """
    turn = min(1.0, cores / processes)
    return SyncCoefficients(nic_efficiency=min(1.0, rate_share), chunk_latency_s=chunk_s, pause_s=0.0,
                            barrier_s=0.0, copy_rate=rates.pack * turn, digest_rate=rates.digest * turn)


async def measure(setup: Setup, rates: Rates, cores: int, logs: Path, route: str = "auto") -> Measured:
    """Run one case.

    Args:
        cores: cores shared by its processes.
        logs: folder for their output.
        route: "auto" selects the route that the simulator chooses.
    """
    case = setup.case
    spares: list[float] = []
    with Network(case.hosts, setup.rate_bits) as network, Members(PRELOAD, logs) as members:
        plain = await plain_rates(members, network.hosts, int(PLAIN_SECONDS * setup.rate_bits / 8))
        share = min(plain) / (setup.rate_bits / 8)
        chunk_s = await small_bucket(members, network.hosts[0], network.hosts[-1])
        known = coefficients(rates, share, chunk_s, case.tp * case.engines, cores)
        prediction = setup.predicted(known, route)
        found = Measured(setup, prediction)
        found.predicted_s = prediction.simulate(known).total_s

        placement = place_cpu(setup.plan, 0, [host.name for host in network.hosts], case.trainer_hosts,
                              {host.name: host.address for host in network.hosts},
                              {host.name: Ports(FIRST) for host in network.hosts})
        world = start_world(members, setup.config, setup.plan, setup.folder, placement,
                            {host.name: host for host in network.hosts},
                            rank_kind=sync_baselines.RANK, worker_kind=sync_baselines.WORKER)
        await _ours(found, network, world, spares)
        if case.baselines:
            await _baselines(found, network, world, spares)
        found.verdict = Verdict(share, min(spares))
    return found


async def _ours(found: Measured, network: Network, world: World, spares: list[float]) -> None:
    """Measure our sync `RUNS` times after one that touches every buffer for the first time. Report and traffic are
    those of the median run. The abort line is on: its listener is in the first trainer's host."""
    setup, first = found.setup, network.hosts[0]
    coordinator = await asyncio.to_thread(
        inside, first, lambda: SyncCoordinator(
            world.trainers, [engine.weights for engine in world.engines], world.endpoints,
            canonical_tensors(setup.plan.architecture), backend="gloo",
            bucket_bytes=min(setup.bucket_bytes, found.prediction.cost.chunk_bytes), timeout_s=setup.timeout_s,
            route=found.prediction.chosen, seats=setup.seats, address=first.address))
    try:
        found.manifest = await coordinator.setup()
        measured = []
        for version in range(1 + RUNS):
            await world.on_ranks("fill", version)
            await world.on_workers("spoil")
            wait_for_quiet(network)
            before = network.traffic()
            with CpuSpare() as cpu:
                report = await coordinator.sync(version)
            nics = tuple(after.since(earlier) for after, earlier in zip(network.traffic(), before, strict=True))
            measured.append((report.seconds["total"], version, report, nics))
            spares += [cpu.share] if version else []
    finally:
        coordinator.close()
    found.runs["ours"] = [seconds for seconds, *_ in measured[1:]]
    _, _, found.ours, found.nics = sorted(measured[1:])[RUNS // 2]


async def _baselines(found: Measured, network: Network, world: World, spares: list[float]) -> None:
    setup = found.setup
    expected = await world.on_workers("whole_digest")        # of weights that VERIFY found equal to the trainer's
    await _open_baselines(setup, world)
    first, workers = world.trainers[0].member, [each for engine in world.engines for each in engine.workers]

    async def timed(calls: Callable[[], Awaitable[object]]) -> float:
        wait_for_quiet(network)
        started = time.monotonic()
        with CpuSpare() as cpu:
            await calls()
        spares.append(cpu.share)
        return time.monotonic() - started

    for _ in range(RUNS):
        gather_s = await timed(lambda: world.on_ranks("gather"))        # the same for each method, so it is done once
        found.runs["gather"].append(gather_s)
        for name, arguments in (("tensors", ()), ("buckets", (setup.bucket_bytes,)), ("ring", (setup.bucket_bytes,))):
            await world.on_workers("spoil")
            send = functools.partial(_on_all, (first, *workers), f"broadcast_{name}", *arguments,
                                     timeout_s=2 * setup.timeout_s)
            found.runs[name].append(gather_s + await timed(send))
            if await world.on_workers("whole_digest") != expected:
                raise RuntimeError(f"{setup.case.name}: after `{name}` the workers hold other weights than after our "
                                   "sync")


async def _on_all(members: Sequence[Member], method: str, *arguments: object, timeout_s: float) -> None:
    await together(each.call(method, *arguments, timeout_s=timeout_s) for each in members)


async def _open_baselines(setup: Setup, world: World) -> None:
    canonical, dtype = canonical_tensors(setup.plan.architecture), TORCH_NAMES["bf16"]
    sources = await together(each.sync_describe() for each in world.trainers)
    # One replica of the trainer sends: rank 0's own.
    others = [each.coordinates.rank for each in sources if each.coordinates.dp]
    gathered = build_manifest(sources, [sync_baselines.whole_tensors(canonical, dtype)], setup.bucket_bytes,
                              gone=others)
    givers = [edge.rank for edge in gathered.edges]
    if givers[0] != 0:
        raise RuntimeError(f"rank 0 sends nothing to the gather, ranks {givers} do")
    address, timeout_s, ports = world.trainers[0].member.host.address, setup.timeout_s, Ports(FIRST)
    meeting = sync_baselines.Meeting(address, ports.lane(100), len(givers), timeout_s)
    calls = []
    for rank, trainer in enumerate(world.trainers):
        edges = [edge for edge in gathered.edges if rank in (0, edge.rank)]
        member = givers.index(rank) if rank in givers and len(givers) > 1 else None
        calls.append(trainer.member.call("gather_open", meeting, member, edges, canonical, timeout_s=2 * timeout_s))
    await together(calls)
    workers = [each for engine in world.engines for each in engine.workers]
    meeting = sync_baselines.Meeting(address, ports.lane(101), 1 + len(workers), timeout_s)
    calls = [world.trainers[0].member.call("broadcast_open", meeting, timeout_s=2 * timeout_s)]
    calls += [each.call("broadcast_open", meeting, 1 + number, each.host.address, dtype, canonical,
                        timeout_s=2 * timeout_s) for number, each in enumerate(workers)]
    await together(calls)


def expected_nics(setup: Setup, manifest: SyncManifest) -> list[Traffic]:
    """Traffic of each host's NIC according to the manifest. A hop between two hosts uses both their NICs."""
    out: dict[int, int] = defaultdict(int)
    into: dict[int, int] = defaultdict(int)
    for (sender, (replica, _)), size in manifest.bytes_per_hop().items():
        source = setup.host_of_rank(sender) if isinstance(sender, int) else setup.host_of_engine(sender[0])
        destination = setup.host_of_engine(replica)
        if source != destination:
            out[source] += size
            into[destination] += size
    return [Traffic(out[host], into[host]) for host in range(setup.case.hosts)]


def worst_share(seen: Sequence[Traffic], expected: Sequence[Traffic]) -> float:
    """Largest relative difference between measured and expected traffic, for NICs that carry more than
    acknowledgements."""
    worst = 0.0
    for there, said in zip(seen, expected, strict=True):
        for found, wanted in ((there.out, said.out), (there.into, said.into)):
            if wanted:
                worst = max(worst, abs(found - wanted) / wanted)
    return worst
