"""Derives the coordinator's arguments for the weight sync from a run's plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launch.config.resolved import ResolvedConfig
from launch.fabric.estimate import KINDS, Kind
from launch.fabric.seated import Seats, seats_of
from launch.fabric.shards import Flow, Shard, flows
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.plan.plan import Placement, Plan, forecast_of
from megatron_rl.weight_sync.plan.manifest import SyncManifest

MIB = 1 << 20


class SyncPlan(NamedTuple):
    """Route, bucket size and seats of the weight sync."""

    route: Kind
    bucket_bytes: int
    seats: Seats


def sync_plan(config: ResolvedConfig, plan: Plan, placement: Placement) -> SyncPlan:
    """The route that the configuration pins, otherwise the plan's. The plan's chunks are the buckets. The route is
    `direct` if the plan has no forecast."""
    forecast, most = forecast_of(plan), int(config.weight_sync.bucket_mb * MIB)
    predicted = {route.route: route for route in forecast.sync.routes} if forecast else {}
    pinned = config.weight_sync.route
    wanted: str = pinned if pinned != "auto" else forecast.sync.chosen if forecast else "direct"
    route: Kind = next((kind for kind in KINDS if kind == wanted), "direct")
    chunk = predicted[route].chunk_bytes if route in predicted else 0
    return SyncPlan(route, min(most, chunk) if chunk else most,
                    seats_of(placement, plan.rollout.tp, forecast.cluster if forecast else None))


def announced(config: ResolvedConfig, plan: Plan) -> tuple[Flow, ...]:
    """The bytes that the plan's fabric moves from each shard to each worker of an engine."""
    sizes = plan.training
    layout = TrainingLayout(tp=sizes.tp, pp=sizes.pp, vpp=sizes.vpp, cp=sizes.cp, dp=sizes.dp,
                            layers_of_stage=tuple(sum(map(len, stage)) for stage in sizes.layers_of_stage))
    return flows(plan.architecture, layout, RolloutLayout(tp=plan.rollout.tp),
                 4 if config.trainer.dtype == "fp32" else 2)


def differences(planned: Sequence[Flow], plan: Plan, manifest: SyncManifest) -> list[str]:
    """One line for each pair of shard and engine rank whose number of bytes differs from the plan's."""
    ours = {(flow.shard, flow.worker.tp): flow.bytes for flow in planned}
    theirs: dict[tuple[Shard, int], int] = {}
    first = min(edge.replica for edge in manifest.edges)
    for edge in manifest.edges:
        if edge.replica == first:
            at = plan.training.ranks[edge.rank]
            key = Shard(at.pp, at.tp), edge.worker
            theirs[key] = theirs.get(key, 0) + edge.nbytes
    return [f"stage {shard.pp}, TP rank {shard.tp} to engine rank {worker}: the plan announced "
            f"{ours.get((shard, worker), 0)} bytes, the layouts need {theirs.get((shard, worker), 0)}"
            for shard, worker in sorted({*ours, *theirs}) if ours.get((shard, worker)) != theirs.get((shard, worker))]
