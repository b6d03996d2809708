"""`megatron-rl sync bench`: measures the sync of a plan next to its prediction, with its processes placed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.simulate import arrivals
from launch.fabric.staging import Staging
from launch.planner.prepare import PreparedForecast
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.sync_bench.compare import EdgeTime, LaneSpeed, Part, edges, found_coefficients, parts, pauses
from megatron_rl.sync_bench.lane_probe import LINKS
from megatron_rl.sync_bench.members import together
from megatron_rl.sync_bench.rates import Rates
from megatron_rl.sync_bench.sites import Site
from megatron_rl.sync_bench.world import LANE, RATES, TORCH_NAMES, World, start_world
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.protocol import Backend, LaneSpec, SyncReport

PROBE_BYTES = 256 << 20
"""Bytes sent to measure a lane alone."""


@dataclass(frozen=True)
class Bench:
    """The measurements, with their predictions."""

    backend: str
    route: str
    processes: int
    what: str
    """Description of the machine or nodes."""
    report: SyncReport
    """Report of the median sync, in place."""
    opening_s: float
    """Seconds for layouts, proof of coverage and lanes."""
    planned_staging: Staging
    staging: Staging
    """Bytes of the buffers of the rank and of the worker that have the most."""
    lane: LaneSpeed
    rates: Rates
    parts: list[Part]
    pauses: list[Part]
    """How long the engines serve nothing, in place and with a second copy."""
    edges: list[EdgeTime]
    coefficients: SyncCoefficients
    """Coefficients of the plan."""
    nic_bandwidth: float
    """NIC bandwidth that the plan assumes."""
    found: dict[str, float]
    """Measured coefficients, by their keys in a cluster file."""


async def bench(prepared: PreparedForecast, site: Site, repeats: int) -> Bench:
    """Start the plan's processes without trainer and engine, sync `repeats` + 1 times and take the median of all but
    the first. Repeat this with engines that receive into a second copy of their weights, for their pause."""
    plan, config, sync, coefficients = prepared.plan, prepared.config, site.sync, site.coefficients
    backend: Backend = "nccl" if plan.device == "gpu" else "gloo"
    rates, lane = await _alone(site, plan.device, backend, TORCH_NAMES[config.trainer.dtype],
                               config.weight_sync.timeout_s, site.bucket_bytes)
    world = start_world(site.members, config, plan, prepared.model_folder, site.placement, site.hosts)
    coordinator = SyncCoordinator(world.trainers, [engine.weights for engine in world.engines], world.endpoints,
                                  canonical_tensors(plan.architecture), backend=backend, bucket_bytes=site.bucket_bytes,
                                  timeout_s=config.weight_sync.timeout_s, route=site.route, seats=site.seats,
                                  address=site.address)
    started = time.monotonic()
    manifest = await coordinator.setup()
    opening_s = time.monotonic() - started
    staging = Staging(max(await world.on_ranks("staging_bytes")), max(await world.on_workers("staging_bytes")))
    report = await _syncs(coordinator, world, repeats)
    await together(engine.stage("shadow") for engine in world.engines)
    await coordinator.setup()
    beside = await _syncs(coordinator, world, repeats)
    coordinator.close()
    route = sync.build(site.route)
    return Bench(
        backend, site.route, plan.training.world_size + sum(each.tp for each in plan.rollout.engines), site.what,
        report, opening_s, sync.staging[site.route], staging, lane, rates,
        parts(sync, site.route, coefficients, report),
        pauses(prepared.found.pauses, {"in_place": report, "shadow": beside}),
        edges(route, arrivals(route, coefficients), site.planned_seats, manifest.bytes_per_hop(), report.arrivals),
        coefficients, route.fabric.nic_bandwidth,
        found_coefficients(lane, route.fabric.nic_bandwidth, rates.pack, rates.digest, report))


async def _syncs(coordinator: SyncCoordinator, world: World, repeats: int) -> SyncReport:
    """The median of `repeats` syncs, after one that touches every buffer for the first time."""
    reports, first = [], 0 if coordinator.version is None else coordinator.version + 1
    for version in range(first, first + 1 + repeats):
        await world.on_ranks("fill", version)
        await world.on_workers("spoil")
        reports.append(await coordinator.sync(version))
    return sorted(reports[1:], key=lambda each: each.seconds["total"])[repeats // 2]


async def _alone(site: Site, device: str, backend: Backend, dtype: str, timeout_s: float,
                 bucket_bytes: int) -> tuple[Rates, LaneSpeed]:
    """The rates of one process, and of one lane from a training node to a rollout node, measured with nothing else
    running."""
    members, placement = site.members, site.placement
    kind = "cuda" if device == "gpu" else "cpu"
    at = ((placement.training[0].node, placement.training[0].gpu),
          (placement.rollout[0].node, next(iter(placement.rollout[0].gpus), None)))
    hosts = [site.hosts[node] for node, _ in at]
    gpus = [{} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)} for _, gpu in at]
    probe = members.start("rates", hosts[0], RATES, dtype, kind, variables=gpus[0])
    rates = await probe.call("measure")
    probe.end()
    ends = [members.start(f"lane {end}", host, LANE, kind, variables=variables)
            for end, host, variables in zip(("sender", "receiver"), hosts, gpus, strict=True)]
    spec = LaneSpec(0, hosts[0].address, placement.master_port, ("receiver",), backend, LINKS)

    async def both(method: str, *args: object) -> list:
        return await together(end.call(method, *args, timeout_s=2 * timeout_s) for end in ends)

    await together(end.call("open", spec, member, host.address, timeout_s)
                   for member, (end, host) in enumerate(zip(ends, hosts, strict=True)))
    size = min(bucket_bytes, PROBE_BYTES // 4)
    await both("stream", size, 2)
    count = max(4, PROBE_BYTES // size)
    seconds = max(await both("stream", size, count))
    lane = LaneSpeed(count * size / seconds, max(await both("small")))
    for end in ends:
        end.end()
    return rates, lane
