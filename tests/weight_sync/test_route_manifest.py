"""The manifest carries out the route that the plan's fabric announced: the same edges with the same bytes."""

from __future__ import annotations

from collections import Counter

import pytest

from launch.cluster.spec import ClusterSpec
from launch.fabric.choose import predict
from launch.fabric.estimate import KINDS
from launch.fabric.lanes import Place, engine_gpus, fabric_of
from launch.fabric.seated import Seats, apart, seats_of
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.plan.plan import EnginePlacement, Placement, RankPlacement
from megatron_rl.weight_sync.coordinator import Endpoint, lane_specs
from megatron_rl.weight_sync.plan.copies import intersect_sides
from megatron_rl.weight_sync.plan.coverage import prove_coverage
from megatron_rl.weight_sync.plan.manifest import build_manifest, route_of
from tests.fabric.cases import H100
from tests.weight_sync.worlds import architecture, destinations, sources, training_plan

CHUNK = 1000


def _cluster(nodes: int, gpus: int, nics: int = 0) -> ClusterSpec:
    return ClusterSpec("test", tuple(f"node{number}" for number in range(nodes)), gpus, H100, nics or gpus, 50e9,
                       nics or gpus, 2 * 10**12)


def _planned_seats(cluster: ClusterSpec, training: TrainingLayout, rollout: RolloutLayout, order) -> Seats:
    """Where the plan has everybody."""
    gpus, first = cluster.gpus_per_node, -(-training.gpus // cluster.gpus_per_node)
    engines = {(replica, worker): place._replace(node=first + place.node) for replica in range(rollout.replicas)
               for worker, place in enumerate(engine_gpus(rollout.tp, 1, replica, order, gpus))}
    return Seats(fabric_of(cluster), tuple(Place(*divmod(rank, gpus)) for rank in range(training.gpus)), engines)


CASES = [
    # trainer, rollout TP, engines, GPUs a node, its NICs
    (dict(tp=2, pp=2), 2, 3, 2, 2),
    (dict(tp=2, pp=2, dp=2), 2, 4, 4, 4),          # twins: two engines on a node
    (dict(tp=4, dp=2), 2, 7, 4, 2),                # twins, and a node that is half full
    (dict(tp=2, pp=2, cp=2), 4, 2, 4, 4),          # KV heads cut further, norms by the nearest rank
    (dict(tp=4, pp=1, dp=3), 1, 2, 2, 1),          # senders that do not divide the receivers
    (dict(tp=1, pp=4, vpp=1), 4, 1, 4, 4),
]


@pytest.mark.parametrize("features", [{}, {"tied": True}, {"qk_norm_whole": True, "post_norm": True}],
                         ids=["untied", "tied", "olmo2"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer, tp, engines, gpus, nics", CASES)
def test_edges_and_bytes_are_those_that_the_plan_announced(trainer, tp, engines, gpus, nics, kind, features):
    a = architecture(heads=8, kv_heads=4, hidden=8, head_dim=4, **features)
    sizes = training_plan(a, **trainer)
    training, rollout = TrainingLayout(**trainer), RolloutLayout(tp=tp, replicas=engines)
    cluster = _cluster(-(-training.gpus // gpus) + -(-engines * tp // gpus), gpus, nics)
    prediction = predict(a, training, rollout, cluster, weight_bytes=4, route=kind)
    announced = prediction.build()

    sides = sources(a, sizes), destinations(a, tp, engines)
    seats = _planned_seats(cluster, training, rollout, prediction.gpu_order)
    found = route_of(intersect_sides(*sides), kind, announced.chunk_bytes, seats)
    assert found.edges == announced.edges and found.fingerprint() == announced.fingerprint()

    manifest = build_manifest(*sides, CHUNK, route=kind, seats=seats)
    prove_coverage(manifest, *sides)
    place = {**dict(enumerate(seats.training)), **seats.rollout}
    sent: Counter = Counter()
    for (sender, receiver), size in manifest.bytes_per_hop().items():
        sent[place[sender], place[receiver]] += size
    planned: Counter = Counter()
    for edge in announced.edges:
        planned[edge.source, edge.destination] += edge.bytes
    assert sent == planned
    lanes = lane_specs(manifest, [Endpoint("", 1)] * len(seats.training), "nccl")
    assert sum(len(lane.links) for lane in lanes) == len(planned), "one for each two that exchange something"
    assert all(sum(bucket.nbytes for bucket in stream.buckets) == stream.nbytes for stream in manifest.streams)


@pytest.mark.parametrize("kind", KINDS)
def test_one_copy_a_node_comes_over_the_network(kind):
    a = architecture()
    training = training_plan(a, tp=2)
    seats = Seats(fabric_of(_cluster(5, 4)), (Place(0, 0), Place(0, 1)),
                  {(replica, worker): Place(1 + replica // 2, 2 * (replica % 2) + worker)
                   for replica in range(8) for worker in range(2)})
    manifest = build_manifest(sources(a, training), destinations(a, 2, 8), CHUNK, route=kind, seats=seats)
    node = {key: place.node for key, place in seats.rollout.items()}
    into: Counter = Counter()
    for (sender, receiver), size in manifest.bytes_per_hop().items():
        into[node[receiver], node.get(sender) == node[receiver]] += size
    one_engine = sum(edge.nbytes for edge in manifest.edges if edge.replica == 0)
    assert set(into.values()) == {one_engine} and len(into) == 8


def test_without_the_dead_their_children_have_other_parents_and_replicas_send():
    a = architecture()
    sides = sources(a, training_plan(a, tp=2, dp=2)), destinations(a, 1, 6)
    seats = apart(4, {(replica, 0) for replica in range(6)})
    whole = build_manifest(*sides, CHUNK, route="chain", seats=seats)
    forwards = {hop.sender for stream in whole.streams for hop in stream.hops} - {None}
    dead = min(forwards)
    rest = [d for d in sides[1] if (d.replica, d.worker) != dead]
    manifest = build_manifest(sides[0], rest, CHUNK, route="chain", seats=seats, gone={3})
    prove_coverage(manifest, sides[0], rest)
    assert {stream.rank for stream in manifest.streams} == {0, 1, 2}
    members = {member for stream in manifest.streams for hop in stream.hops for member in hop}
    assert dead not in members and {(d.replica, d.worker) for d in rest} < members
    assert manifest.route_fingerprint() != whole.route_fingerprint()
    with pytest.raises(ValueError, match="stage 0, TP rank 1 is left"):
        build_manifest(sides[0], rest, CHUNK, route="chain", seats=seats, gone={1, 3})


def test_engines_of_different_sizes_have_streams_of_their_own():
    """Nobody passes on what the next one has cut otherwise."""
    a = architecture()
    wide = [d for d in destinations(a, 2, 2)]
    narrow = [type(d)(d.replica + 2, *[getattr(d, name) for name in ("worker", "layouts", "dtypes", "padding")])
              for d in destinations(a, 1, 2)]
    sides = sources(a, training_plan(a, tp=2)), [*wide, *narrow]
    manifest = build_manifest(*sides, CHUNK, route="chain")
    prove_coverage(manifest, *sides)
    assert all(len({replica // 2 for replica, _ in stream.receivers}) == 1 for stream in manifest.streams)


def test_seats_come_from_the_placement():
    """Training nodes first; without GPUs each process of a node has its own seat."""
    ranks = tuple(RankPlacement(rank=rank, node=f"n{rank // 2}", gpu=None, port=1) for rank in range(4))
    engines = tuple(EnginePlacement(replica=replica, node=("n7", "n0")[replica], gpus=()) for replica in range(2))
    placement = Placement(attempt=0, plan_fingerprint="", nodes=("n0", "n1", "n7"), addresses={}, training=ranks,
                          rollout=engines, master_port=1, leaves={"n0": 1, "n1": 1, "n7": 4})
    seats = seats_of(placement, 2)
    assert seats.training == (Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1))
    assert dict(seats.rollout) == {(0, 0): Place(2, 0), (0, 1): Place(2, 1), (1, 0): Place(0, 2), (1, 1): Place(0, 3)}
    assert seats.fabric.gpus_per_node == 4 and seats.fabric.leaf_of_node == (1, 1, 4)

    on_gpus = placement.model_copy(update={
        "training": tuple(rank.model_copy(update={"gpu": 3 - rank.rank}) for rank in ranks),
        "rollout": (EnginePlacement(replica=0, node="n7", gpus=(6, 2)),)})
    seats = seats_of(on_gpus, 2)
    assert seats.training[1] == Place(0, 2) and seats.rollout[0, 1] == Place(2, 2)
