"""What a run takes from its configuration, plan and placement: route, buckets, seats, announced bytes."""

from __future__ import annotations

import pytest

from launch.plan.plan import EnginePlacement, Placement, RankPlacement, read_plan
from launch.planner.prepare import prepare
from megatron_rl.driver.sync_plan import announced, differences, sync_plan
from megatron_rl.weight_sync.plan.manifest import build_manifest
from tests.job.runner import CONFIG
from tests.weight_sync.worlds import destinations, sources

CHUNKS = {"direct": 256 << 20, "chain": 3 << 20, "tree": 2 << 20}


@pytest.fixture(scope="module")
def prepared():
    return prepare(CONFIG, ("rollout.replicas=2",), "cpu")


def _placement(plan) -> Placement:
    return Placement(
        attempt=0, plan_fingerprint="", nodes=("n0", "n1"), addresses={}, master_port=1,
        training=tuple(RankPlacement(rank=each.rank, node="n0", gpu=None, port=1) for each in plan.training.ranks),
        rollout=tuple(EnginePlacement(replica=each.replica, node="n1", gpus=()) for each in plan.rollout.engines))


def _with(prepared, chosen: str, route: str, bucket_mb: float = 256.0):
    """(configuration, plan) whose plan has chosen a route and whose configuration says another."""
    config, plan = prepared.config, prepared.plan
    sync = plan.forecast.sync
    routes = tuple(each.model_copy(update={"chunk_bytes": CHUNKS[each.route]}) for each in sync.routes)
    sync = sync.model_copy(update={"chosen": chosen, "routes": routes})
    plan = plan.model_copy(update={"forecast": plan.forecast.model_copy(update={"sync": sync})})
    section = config.weight_sync.model_copy(update={"route": route, "bucket_mb": bucket_mb})
    return config.model_copy(update={"weight_sync": section}), plan


@pytest.mark.parametrize("chosen, asked, taken", [
    ("tree", "auto", "tree"), ("direct", "auto", "direct"), ("tree", "chain", "chain"), ("chain", "direct", "direct")])
def test_the_configuration_pins_the_route_and_auto_takes_the_plans(prepared, chosen, asked, taken):
    config, plan = _with(prepared, chosen, asked)
    found = sync_plan(config, plan, _placement(plan))
    assert (found.route, found.bucket_bytes) == (taken, CHUNKS[taken])
    config, plan = _with(prepared, chosen, asked, bucket_mb=1.0)
    assert sync_plan(config, plan, _placement(plan)).bucket_bytes == 1 << 20


def test_the_forecast_follows_a_pinned_route(prepared):
    assert prepared.plan.forecast.sync.chosen == prepared.plan.forecast.sync.routes[0].route == "direct"
    pinned = prepare(CONFIG, ("weight_sync.route=tree", "rollout.replicas=2"), "cpu").plan.forecast.sync
    assert pinned.chosen == "tree" and "pinned" in pinned.reason
    assert all(route.chunk_bytes > 0 for route in pinned.routes)


def test_without_a_forecast_the_route_is_direct(prepared):
    plan = read_plan(prepared.plan.model_dump() | {"forecast": None})
    found = sync_plan(prepared.config, plan, _placement(plan))
    assert (found.route, found.bucket_bytes) == ("direct", int(prepared.config.weight_sync.bucket_mb * 2**20))


def test_bytes_that_were_not_announced_are_told(prepared):
    config, plan = prepared.config, prepared.plan
    a, tp = plan.architecture, plan.rollout.tp
    sides = sources(a, plan.training), destinations(a, tp, 2)
    manifest = build_manifest(*sides, seats=sync_plan(config, plan, _placement(plan)).seats)
    planned = announced(config, plan)
    assert differences(planned, plan, manifest) == []
    (line, *others) = differences((planned[0]._replace(bytes=4), *planned[1:]), plan, manifest)
    assert line == (f"stage 0, TP rank 0 to engine rank 0: the plan announced 4 bytes, the layouts need "
                    f"{planned[0].bytes}") and not others
