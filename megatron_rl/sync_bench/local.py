"""`megatron-rl sync bench`: the sync of a configuration's plan on this machine, measured beside its prediction."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from launch.fabric.lanes import Place, engine_gpus
from launch.fabric.seated import Seats
from launch.fabric.simulate import arrivals
from launch.planner.coefficients.sync import SyncCoefficients
from launch.planner.prepare import Prepared
from launch.ports import Ports, allocate
from megatron_rl.sync_bench.compare import EdgeTime, Lane, Part, edges, found_coefficients, parts
from megatron_rl.sync_bench.lane_probe import LINKS
from megatron_rl.sync_bench.members import Host, Members, together
from megatron_rl.sync_bench.rates import Rates
from megatron_rl.sync_bench.world import LANE, PRELOAD, RATES, TORCH_NAMES, World, start_world
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.megatron_layout import canonical_tensors
from megatron_rl.weight_sync.protocol import LaneSpec, SyncReport

HERE = Host("this machine")
PROBE_BYTES = 256 << 20
"""Through a lane alone."""


@dataclass(frozen=True)
class Bench:
    """What was measured, with its prediction."""

    backend: str
    route: str
    processes: int
    cores: int
    report: SyncReport
    """Of the median sync."""
    opening_s: float
    """Layouts, proof of coverage, lanes."""
    lane: Lane
    rates: Rates
    parts: list[Part]
    edges: list[EdgeTime]
    coefficients: SyncCoefficients
    """Of the plan."""
    nic_bandwidth: float
    """That the plan assumes."""
    found: dict[str, float]
    """Coefficients of this machine, by their keys in a cluster file."""


async def bench(prepared: Prepared, repeats: int, logs: Path) -> Bench:
    """Start the plan's processes without trainer and engine, sync `repeats` + 1 times and take the median of those
    after the first."""
    plan, config, found = prepared.plan, prepared.loaded.config, prepared.found
    backend, dtype = ("nccl" if plan.device == "gpu" else "gloo"), TORCH_NAMES[config.trainer.dtype]
    device, bucket = ("cuda" if plan.device == "gpu" else "cpu"), int(config.weight_sync.bucket_mb * (1 << 20))
    seats, ports = planned_seats(prepared), allocate(address=HERE.address)
    try:
        with Members(PRELOAD, logs) as members:
            rates, lane = await _alone(members, ports, backend, dtype, device, config.weight_sync.timeout_s, bucket)
            world = start_world(members, config, plan, prepared.model_folder, ports={HERE.name: ports},
                                rank_hosts=[HERE] * plan.training.world_size,
                                engine_hosts=[HERE] * len(plan.rollout.engines))
            coordinator = SyncCoordinator(world.trainers, world.engines, world.endpoints,
                                          canonical_tensors(plan.architecture), backend=backend,
                                          bucket_bytes=min(bucket, found.sync.cost.chunk_bytes),
                                          timeout_s=config.weight_sync.timeout_s, route=found.sync.chosen, seats=seats)
            started = time.monotonic()
            manifest = await coordinator.setup()
            opening_s = time.monotonic() - started
            reports = await _syncs(coordinator, world, repeats)
    finally:
        ports.release()
    report = sorted(reports, key=lambda each: each.seconds["total"])[len(reports) // 2]
    coefficients, sync = found.problem.coefficients.sync, found.sync
    route = sync.build()
    return Bench(
        backend, sync.chosen, plan.training.world_size + sum(each.tp for each in plan.rollout.engines),
        len(os.sched_getaffinity(0)),
        report, opening_s, lane, rates, parts(sync, sync.chosen, coefficients, report),
        edges(route, arrivals(route, coefficients), seats, manifest.bytes_per_hop(), report.arrivals), coefficients,
        route.fabric.nic_bandwidth,
        found_coefficients(lane, route.fabric.nic_bandwidth, rates.pack, rates.digest, report))


def planned_seats(prepared: Prepared) -> Seats:
    """Where the plan's fabric puts everybody: training ranks first, engines on nodes of their own."""
    found = prepared.found
    fabric, rollout = found.sync.traffic.fabric, found.rollout.layout
    ranks = found.training.layout.gpus
    first = -(-ranks // fabric.gpus_per_node)
    places = {(replica, worker): place._replace(node=first + place.node) for replica in range(rollout.replicas)
              for worker, place in enumerate(engine_gpus(rollout.tp, rollout.pp, replica, found.sync.gpu_order,
                                                         fabric.gpus_per_node))}
    return Seats(fabric, tuple(Place(*divmod(rank, fabric.gpus_per_node)) for rank in range(ranks)), places)


async def _syncs(coordinator: SyncCoordinator, world: World, repeats: int) -> list[SyncReport]:
    reports = []
    for version in range(1 + repeats):
        await world.on_ranks("fill", version)
        await world.on_workers("spoil")
        reports.append(await coordinator.sync(version))
    return reports[1:]          # the first one touches every buffer for the first time


async def _alone(members: Members, ports: Ports, backend: str, dtype: str, device: str, timeout_s: float,
                 bucket_bytes: int) -> tuple[Rates, Lane]:
    """What one process does, then what one lane does, with nothing beside them."""
    probe = members.start("rates", HERE, RATES, dtype, device)
    rates = await probe.call("measure")
    probe.end()
    ends = [members.start(f"lane {end}", HERE, LANE, device)
            for end in ("sender", "receiver")]
    spec = LaneSpec(0, HERE.address, ports.rendezvous, ("receiver",), backend, LINKS)

    async def both(method: str, *args: object) -> list:
        return await together(end.call(method, *args, timeout_s=2 * timeout_s) for end in ends)

    await together(end.call("open", spec, member, HERE.address, timeout_s) for member, end in enumerate(ends))
    size = min(bucket_bytes, PROBE_BYTES // 4)
    await both("stream", size, 2)
    count = max(4, PROBE_BYTES // size)
    seconds = max(await both("stream", size, count))
    lane = Lane(count * size / seconds, max(await both("small")))
    for end in ends:
        end.end()
    return rates, lane
