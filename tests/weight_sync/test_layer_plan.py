"""The buffers of quantised layers: few are needed, and nobody waits in a circle for one. All members of the shipped
plans are simulated as they run (`test_issue_order`), with engines whose TP ranks quantise together."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import pytest

from launch.fabric.estimate import KINDS, MINOR
from launch.fabric.routes import ROOT, Route
from launch.planner.prepare import prepare
from megatron_rl.layouts.tiles import Tile
from megatron_rl.weight_sync.plan.buckets import Bucket, Copy
from megatron_rl.weight_sync.plan.layers import LayerPlan, by_layer, plan_layers, slots_by_layers
from megatron_rl.weight_sync.plan.streams import Stream, schedule, turns
from tests.weight_sync.test_issue_order import MOST_BUCKETS, Step, World, streams_of

PLANS = {"TP4 PP4 to TP4": ("70b/grpo_fp8_rollout", "trainer.tp=4", "trainer.pp=4", "trainer.cp=2",
                             "trainer.dp=4", "rollout.tp=4"),
         "TP8 PP2 to TP4": ("70b/grpo_fp8_rollout", "trainer.tp=8", "trainer.pp=2", "rollout.tp=4"),
         "TP4 PP4 to TP8": ("70b/grpo_fp8_rollout", "trainer.tp=4", "trainer.pp=4", "trainer.cp=2",
                             "trainer.dp=4", "rollout.tp=8"),
         "TP2 to TP1": ("7b/grpo", "rollout.dtype=fp8", "trainer.dtype=bf16", "rollout.tp=1")}
LAYERS = 80
"""Of a stage, each with one parameter: 20 layers of a 70B have as many matrices that are quantised as one."""


@pytest.fixture(scope="module")
def found():
    return {name: prepare(f"configs/{config}.yaml", changes, "gpu").found for name, (config, *changes) in PLANS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLANS)
def test_nobody_waits_in_a_circle_for_a_buffer(found, name, kind):
    """And there are no more of them than the plan has memory for, unless every trainer sends a part of every copy."""
    streams, tp = _quantised_streams(found[name].network.build(kind))
    plans, planned = _plans(streams, tp), found[name].rollout.layer_buffers
    in_parts = kind == "direct" and name == "TP4 PP4 to TP4"
    assert max(plan.count for plan in plans.values()) <= (12 if in_parts else planned)
    world = _World(streams, plans)
    assert world.run() == []
    assert all(world.quantised[me] == list(plan.order) for me, plan in plans.items())


def test_the_slots_of_a_route_would_leave_a_stage_incomplete(found):
    """In the last node there is one engine of TP 4, and the two shares of its layers come through one network card."""
    one = found["TP8 PP2 to TP4"]
    layout = replace(one.rollout.layout, replicas=one.rollout.layout.replicas - 1)
    route = replace(one.network, rollout=layout).build("direct")
    ours, tp = _quantised_streams(route)
    theirs, _ = _quantised_streams(route, in_slots=False)
    assert max(plan.count for plan in _plans(ours, tp).values()) <= one.rollout.layer_buffers
    assert max(plan.count for plan in _plans(theirs, tp).values()) == LAYERS * 2


def test_the_simulation_sees_a_circle(found):
    """Two buffers swapped: a layer waits for one that comes after it."""
    streams, tp = _quantised_streams(found["TP4 PP4 to TP8"].network.build("direct"))
    plans = _plans(streams, tp)
    wrong = {me: replace(plan, order=plan.order[::-1], buffers=plan.buffers[::-1]) for me, plan in plans.items()}
    assert _World(streams, wrong).run()


def test_a_layer_takes_the_buffer_of_one_that_is_complete_before_on_all_tp_ranks():
    """Worker 1 has the second layer early, worker 0 late."""
    def stream(number: int, worker: int, slot: int, *layers: str) -> Stream:
        return Stream(number, 0, slot, 1, (), tuple(Bucket(1, (_copy(f"{layer}.weight"),)) for layer in layers))

    names = [f"{layer}.weight" for layer in "abc"]
    both = plan_layers([[stream(0, 0, 0, "a", "b", "c")], [stream(1, 1, 0, "a", "b", "c")]], names)
    assert both == (LayerPlan(("a", "b", "c"), (0, 0, 0)),) * 2
    late = plan_layers([[stream(0, 0, 0, "a", "c"), stream(2, 0, 1, "b")], [stream(1, 1, 0, "a", "b", "c")]], names)
    assert late == (LayerPlan(("a", "c", "b"), (0, 0, 0)), LayerPlan(("a", "c", "b"), (0, 1, 0)))


def test_parts_of_a_bucket():
    """What is written in place first, then layer by layer; a bias belongs to the layer, and is written in place."""
    names = ["l.0.qkv.weight", "l.0.qkv.bias", "l.0.norm.weight", "l.0.o.weight", "l.0.o.extra"]
    bucket = Bucket(5, tuple(map(_copy, names)))
    parts = [(layer, [copy.destination for copy in copies])
             for layer, copies in by_layer(bucket, {names[0], names[3], names[4]})]
    assert parts == [(None, names[1:3]), ("l.0.qkv", names[:1]), ("l.0.o", names[3:])]


def _copy(name: str) -> Copy:
    tile = Tile(name, (0,), (1,), (1,), 0)
    return Copy(name, tile, name, tile, "bfloat16")


def _quantised_streams(route: Route, in_slots: bool = True) -> tuple[list[Stream], int]:
    """The streams of a route, whose buckets carry the layers of a stage in order; and the engines' TP. Workers are
    (replica, TP rank)."""
    total: dict[tuple, int] = defaultdict(int)
    seats: dict[tuple, list] = defaultdict(list)
    for edge in route.edges:
        total[edge.shard, edge.worker] = max(total[edge.shard, edge.worker], edge.first_byte + edge.bytes)
        if edge.destination not in seats[edge.destination.node, edge.worker.tp]:
            seats[edge.destination.node, edge.worker.tp].append(edge.destination)
    workers = {place: ((node, number), tp) for (node, tp), places in seats.items()
               for number, place in enumerate(sorted(places))}
    replicas = {each: number for number, each in enumerate(sorted({replica for replica, _ in workers.values()}))}
    streams = streams_of(route, {place: (replicas[replica], tp) for place, (replica, tp) in workers.items()})
    roots = [edge for edge in route.edges if edge.parent == ROOT]
    stages = {stream.rank: edge.shard.pp for stream, edge in zip(streams, roots, strict=True)}
    made = []
    for stream, edge in zip(streams, roots, strict=True):
        all_of_it, count, buckets = total[edge.shard, edge.worker], len(stream.buckets), []
        layered = MINOR * all_of_it > max(total.values())       # else, rows of the vocabulary
        for number in range(count):
            first = edge.first_byte + edge.bytes * number // count
            last = edge.first_byte + edge.bytes * (number + 1) // count
            layers = range(first * LAYERS // all_of_it, ceil(last * LAYERS / all_of_it))
            copies = tuple(_copy(f"stage{edge.shard.pp}.layer{layer}.weight") for layer in layers)
            buckets.append(Bucket(1, copies if layered else ()))
        made.append(replace(stream, buckets=tuple(buckets)))
    assert max(len(stream.buckets) for stream in made) == MOST_BUCKETS
    tp = 1 + max(tp for _, tp in workers.values())
    return list(slots_by_layers(made, _names(made), stages)) if in_slots else made, tp


def _names(streams: list[Stream]) -> set[str]:
    return {copy.destination for stream in streams for bucket in stream.buckets for copy in bucket.copies}


def _plans(streams: list[Stream], tp: int) -> dict[tuple[int, int], LayerPlan]:
    on: dict[tuple[int, int], list[Stream]] = defaultdict(list)
    for stream in streams:
        for receiver in stream.receivers:
            on[receiver].append(stream)
    names, plans = _names(streams), {}
    for replica in sorted({replica for replica, _ in on}):
        ranks = [(replica, rank) for rank in range(tp)]
        plans |= dict(zip(ranks, plan_layers([on[rank] for rank in ranks], names), strict=True))
    return plans


class _World(World):
    """All members, with the buffers of `LayerBuffers`."""

    def __init__(self, streams: list[Stream], plans: dict[tuple[int, int], LayerPlan]) -> None:
        super().__init__(streams, turns(streams))
        self._plans, self._names = plans, _names(streams)
        self._left: dict[tuple, int] = defaultdict(int)
        for stream, number in schedule(streams):
            for layer, _ in by_layer(stream.buckets[number], self._names):
                for receiver in stream.receivers:
                    self._left[receiver, layer] += 1
        self._before: dict[tuple, str | None] = {}
        for me, plan in plans.items():
            last: dict[int, str] = {}
            for layer, number in zip(plan.order, plan.buffers, strict=True):
                self._before[me, layer] = last.get(number)
                last[number] = layer
        self.quantised: dict[tuple[int, int], list[str]] = {me: [] for me in plans}

    def written(self, me: tuple[int, int], stream: Stream, number: int) -> Iterator[Step]:
        for layer, _ in by_layer(stream.buckets[number], self._names):
            yield "take", (me, layer)
            yield "wrote", (me, layer)

    def _try(self, step: Step, ready: deque, stuck: dict[int, Step]) -> tuple[bool, int | None]:
        if step[0] == "take":
            before = self._before[step[1]]
            return before is None or before in self.quantised[step[1][0]], None
        if step[0] != "wrote":
            return super()._try(step, ready, stuck)
        self._left[step[1]] -= 1
        replica = step[1][0][0]
        ranks = [me for me in self._plans if me[0] == replica]
        order = self._plans[ranks[0]].order
        while (done := len(self.quantised[ranks[0]])) < len(order) and not any(
                self._left[me, order[done]] for me in ranks):
            for me in ranks:
                self.quantised[me].append(order[done])
            for key in [key for key in self._sleeping if isinstance(key[0], tuple) and key[0] in ranks]:
                ready.extend((sleeper, stuck[sleeper]) for sleeper in self._sleeping.pop(key))
        return True, None
