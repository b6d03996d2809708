"""Placement on random clusters: valid, conserving, independent of the order of the nodes; and the refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from launch.cluster.gpus import H100
from launch.cluster.spec import ClusterSpec, Switch
from launch.cluster.tree import natural_order, topology
from launch.errors import UserError
from launch.fabric.gpu_order import engine_gpu_order
from launch.plan.layouts import RolloutLayout, TrainingLayout, rank_coordinates
from launch.planner.seats.cluster import Seating, bind, place
from launch.ports import Ports


def cluster(nodes: int = 32, gpus: int = 8, leaf: int = 0, nics: int | None = None) -> ClusterSpec:
    """`leaf` nodes a leaf switch under one spine; 0: one rail group."""
    names = tuple(f"h{number}" for number in range(1, nodes + 1))
    leaves = [Switch(f"leaf{at // leaf}", nodes=names[at:at + leaf]) for at in range(0, nodes, leaf)] if leaf else []
    top = [Switch("spine", switches=tuple(each.name for each in leaves))] if leaf else []
    nics = gpus if nics is None else nics
    return ClusterSpec("test", names, gpus, H100, nics, 50e9, nics, 2 * 10**12, switches=(*leaves, *top))


@st.composite
def jobs(draw):
    """A job and a cluster that holds it, with a few nodes more."""
    gpus = draw(st.sampled_from([4, 8]))
    divisors = [size for size in (1, 2, 4, 8) if gpus % size == 0]
    training = TrainingLayout(tp=draw(st.sampled_from([*divisors, 3])), cp=draw(st.sampled_from([1, 2, 4])),
                              pp=draw(st.integers(1, 4)), dp=draw(st.integers(1, 6)))
    rollout = RolloutLayout(tp=draw(st.sampled_from(divisors)), pp=draw(st.sampled_from([1, 1, 2])),
                            replicas=draw(st.integers(1, 12)))
    spares = draw(st.integers(0, 2))
    nodes = training.gpus + rollout.gpus + spares + draw(st.integers(0, 3))     # enough whatever is left over
    job = dict(training=training, rollout=rollout, spares=spares, mode=draw(st.sampled_from(
        ["disaggregated", "disaggregated", "colocated", "hybrid"])))
    where = cluster(nodes, gpus, draw(st.sampled_from([0, 2, 3, 8])), draw(st.sampled_from([1, gpus // 2, gpus])))
    return job, where, draw(st.permutations(where.nodes))


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_every_placement_is_valid(case):
    job, where, names = case
    layout, rollout = job["training"], job["rollout"]
    more = dict(mode=job["mode"], spares=job["spares"], gpu_order=engine_gpu_order(
        layout, rollout.tp, rollout_pp=rollout.pp, gpus_per_node=where.gpus_per_node, rails=where.rails))
    seating = place(layout, rollout, where, names, **more)
    assert seating == place(layout, rollout, where, sorted(names), **more)

    engines = [seat for engine in seating.rollout for seat in engine]
    assert len(seating.training) == layout.gpus and len(set(seating.training)) == layout.gpus
    assert len(seating.rollout) == rollout.replicas and len(set(engines)) == len(engines) == rollout.gpus
    for seat in (*seating.training, *engines):
        assert 0 <= seat.gpu < where.gpus_per_node
        assert seat.nic == seat.gpu * where.nics_per_node // where.gpus_per_node

    # Conservation: each node has one role, each GPU of a node in use is in one seat or idle.
    assert Counter((*seating.training_nodes, *seating.rollout_nodes, *seating.spares)) == Counter(where.nodes)
    assert len(seating.spares) >= job["spares"]
    used = {*seating.training, *engines}
    assert used.isdisjoint(seating.idle)
    nodes_in_use = len(seating.training_nodes) + len(seating.rollout_nodes)
    assert len(used) + len(seating.idle) == nodes_in_use * where.gpus_per_node
    assert {seat.node for seat in used} == {*seating.training_nodes, *seating.rollout_nodes}
    if job["mode"] == "disaggregated":
        assert len(used) == layout.gpus + rollout.gpus

    groups = members(layout)
    assert all(len({seating.training[rank].node for rank in group}) == 1 for group in groups["tp"])
    if layout.tp * layout.cp <= where.gpus_per_node:
        assert all(len({seating.training[rank].node for rank in group}) == 1 for group in groups["cp"])
    for engine in seating.rollout:
        for first in range(0, len(engine), rollout.tp):
            assert len({seat.node for seat in engine[first:first + rollout.tp]}) == 1
        if len(engine) <= where.gpus_per_node:
            assert len({seat.node for seat in engine}) == 1


@settings(max_examples=80, deadline=None)
@given(jobs())
def test_peers_share_a_rail(case):
    """Where TP x CP divides the node: a DP group sits on the same local GPUs of every node that it has members on,
    and neighbouring stages are on one node or on equal local indices."""
    job, where, names = case
    layout = job["training"]
    assume(where.gpus_per_node % (layout.tp * layout.cp) == 0)
    blocks = where.gpus_per_node // (layout.tp * layout.cp)
    assume(layout.dp % blocks == 0 or (layout.pp % blocks == 0))
    seats = place(layout, job["rollout"], where, names, mode=job["mode"]).training
    groups = members(layout)
    for group in groups["dp"]:
        local: dict[str, set[int]] = {}
        for rank in group:
            local.setdefault(seats[rank].node, set()).add(seats[rank].gpu)
        assert len({frozenset(gpus) for gpus in local.values()}) == 1
    for group in groups["pp"]:
        for here, there in zip(group, group[1:], strict=False):
            assert seats[here].node == seats[there].node or seats[here].gpu == seats[there].gpu
            assert layout.dp % blocks or seats[here].gpu == seats[there].gpu


def members(layout: TrainingLayout) -> dict[str, list[list[int]]]:
    """Ranks of each group, from Megatron's coordinates."""
    groups: dict[str, dict[tuple, list[int]]] = {axis: {} for axis in ("tp", "cp", "dp", "pp")}
    for each in rank_coordinates(layout.tp, layout.cp, layout.dp, layout.pp):
        for axis in groups:
            key = tuple(getattr(each, other) for other in groups if other != axis)
            groups[axis].setdefault(key, []).append(each.rank)
    return {axis: list(found.values()) for axis, found in groups.items()}


EXERCISE = TrainingLayout(tp=4, cp=2, dp=5, pp=4)


def test_the_exercise():
    """70B on 32 nodes: node 5 pp + dp, DP rings and PP edges on equal local indices, 12 nodes of rollout."""
    seating = place(EXERCISE, RolloutLayout(tp=8, replicas=12), cluster(), gpu_order=engine_gpu_order(EXERCISE, 8))
    for each in rank_coordinates(4, 2, 5, 4):
        seat = seating.training[each.rank]
        assert (seat.node, seat.gpu, seat.nic) == (f"h{5 * each.pp + each.dp + 1}", each.tp + 4 * each.cp, seat.gpu)
    assert seating.rollout_nodes == tuple(f"h{number}" for number in range(21, 33)) and seating.spares == ()
    # TP4 shard t lies on GPUs t and t + 4; ranks 2t and 2t + 1 of a TP8 engine need its halves.
    for engine in seating.rollout:
        assert [seat.gpu % 4 for seat in engine] == [rank // 2 for rank in range(8)]


def test_a_ring_stays_under_its_leaf():
    """Four leaves of eight nodes: a stage's five nodes lie under one leaf, the tree is cut between stages."""
    where = cluster(leaf=8)
    seating = place(EXERCISE, RolloutLayout(tp=8, replicas=12), where)
    leaf = topology(where.switches, where.nodes).leaf_of()
    for stage in range(4):
        assert len({leaf[node] for node in seating.training_nodes[5 * stage:5 * stage + 5]}) == 1


def test_partitions_are_cut_along_leaves():
    """16 training and 8 rollout nodes on leaves of 4, 8, 8, 8 nodes: no leaf has both."""
    names = tuple(f"h{number}" for number in range(28))
    leaves = (Switch("a", nodes=names[:4]), Switch("b", nodes=names[4:12]), Switch("c", nodes=names[12:20]),
              Switch("d", nodes=names[20:]), Switch("top", switches=("a", "b", "c", "d")))
    where = replace(cluster(), nodes=names, switches=leaves)
    seating = place(TrainingLayout(tp=8, dp=8, pp=2), RolloutLayout(tp=8, replicas=8), where)
    leaf = topology(leaves, names).leaf_of()
    trains, rolls = ({leaf[node] for node in nodes} for nodes in (seating.training_nodes, seating.rollout_nodes))
    assert not trains & rolls and len(trains) == 2 and len(seating.spares) == 4


def test_spares_are_the_nodes_to_avoid_else_the_last():
    small, four = RolloutLayout(tp=8, replicas=2), TrainingLayout(tp=8, dp=4)
    assert place(four, small, cluster(8)).spares == ("h7", "h8")
    assert place(four, small, cluster(8), avoid=["h1", "h3"]).spares == ("h1", "h3")
    assert place(four, small, cluster(8), avoid=["h1", "h3", "h4"]).spares == ("h3", "h4")     # one is needed


def test_nodes_with_gaps_and_in_any_order():
    names = ["h10", "h9", "h2", "h30"]
    seating = place(TrainingLayout(tp=8, dp=2), RolloutLayout(tp=8, replicas=2), cluster(), names)
    assert seating.training_nodes + seating.rollout_nodes == ("h2", "h9", "h10", "h30")
    assert natural_order(["n10", "n9", "n09", "a"]) == ["a", "n09", "n9", "n10"]


def test_one_node_holds_both_partitions():
    seating = place(TrainingLayout(tp=2, dp=2), RolloutLayout(tp=2, replicas=2), cluster(1))
    assert [seat.gpu for seat in seating.training] == [0, 1, 2, 3]
    assert [[seat.gpu for seat in engine] for engine in seating.rollout] == [[4, 5], [6, 7]]
    colocated = place(TrainingLayout(tp=2, dp=4), RolloutLayout(tp=4, replicas=2), cluster(1), mode="colocated")
    assert [[seat.gpu for seat in engine] for engine in colocated.rollout] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_engine_over_two_nodes():
    seating = place(TrainingLayout(tp=8), RolloutLayout(tp=16, replicas=2), cluster(5), tp_across_nodes=True)
    assert [[seat.node for seat in engine[::8]] for engine in seating.rollout] == [["h2", "h3"], ["h4", "h5"]]
    assert len({seat.node for seat in place(TrainingLayout(tp=16), RolloutLayout(), cluster(3),
                                            tp_across_nodes=True).training}) == 2


def bound(seating: Seating):
    addresses = {f"h{number}": f"10.0.0.{number}" for number in range(1, 33)}
    return bind(seating, "fingerprint", 3, addresses, Ports(12288))


def test_a_bound_placement():
    placement = bound(place(TrainingLayout(tp=8, dp=2), RolloutLayout(tp=16, replicas=1), cluster(5), spares=1,
                            tp_across_nodes=True))
    assert placement.nodes == ("h1", "h2", "h3", "h4") and placement.spares == ("h5",)
    assert set(placement.addresses) == set(placement.nodes) and placement.attempt == 3
    assert [(each.node, each.gpu, each.nic) for each in placement.training[6:10]] == [
        ("h1", 6, 6), ("h1", 7, 7), ("h2", 0, 0), ("h2", 1, 1)]
    assert len({(each.node, each.port) for each in placement.training}) == 16
    assert placement.training[0].port == placement.training[8].port      # lanes are numbered on their node
    engine = placement.rollout[0]
    assert engine.node == "h3" and engine.nodes == ("h3",) * 8 + ("h4",) * 8 and engine.nics == (*range(8), *range(8))
    assert bound(place(TrainingLayout(), RolloutLayout(), cluster(1))).rollout[0].nodes == ()
    assert placement.ports == {} and placement.interface("h1") == "lo"


def test_each_node_has_its_own_block_of_ports():
    seating = place(TrainingLayout(tp=8, dp=2), RolloutLayout(tp=8, replicas=1), cluster(3))
    ports = {f"h{number}": Ports(12288 + 512 * number) for number in (3, 1, 2)}
    addresses, interfaces = dict.fromkeys(ports, "10.0.0.7"), {"h1": "ib0", "h2": "ib0", "h3": "bond0"}
    placement = bind(seating, "fingerprint", 1, addresses, ports, interfaces)
    assert placement.ports == {node: ports[node].base for node in ("h1", "h2", "h3")}
    assert placement.master_port == ports[placement.training[0].node].rendezvous
    for node in ("h1", "h2"):
        lanes = [rank.port for rank in placement.training if rank.node == node]
        assert lanes == [ports[node].lane(number) for number in range(8)]
    assert len({rank.port for rank in placement.training}) == 16        # one address: the numbers must differ
    assert placement.interface("h3") == "bond0"


@pytest.mark.parametrize("job, what, where, fix", [
    (dict(nodes=[]), "no nodes", "the node list", "name at least one"),
    (dict(nodes=["h1", "h2", "h1"]), "h1 is in the node list twice", "the node list", "once"),
    (dict(nodes=["h1"]), "needs 2 nodes (1 for training, 1 for rollout, 0 spare) and there are 1", "the node list",
     "more nodes"),
    (dict(spares=31), "needs 33 nodes", "the cluster's nodes", "fewer spares"),
    (dict(spares=-1), "-1 spare", "placement.spare_nodes", "0 or more"),
    (dict(training=TrainingLayout(tp=16)), "trainer.tp = 16 exceeds the 8 GPUs", "trainer.tp",
     "placement.tp_across_nodes=true"),
    (dict(rollout=RolloutLayout(tp=16)), "rollout.tp = 16 exceeds the 8 GPUs", "rollout.tp", "rollout.tp <= 8"),
    (dict(training=TrainingLayout(tp=12), tp_across_nodes=True), "does not fill whole nodes", "trainer.tp",
     "multiple"),
    (dict(gpu_order=[0] * 8), "[0, 0, 0", "the GPU order", "each once"),
    (dict(gpu_order=[0, 1]), "8 engine ranks", "the GPU order", "0 to 7")])
def test_refusals(job, what, where, fix):
    job = dict(training=TrainingLayout(tp=8), rollout=RolloutLayout(tp=8), cluster=cluster()) | job
    with pytest.raises(UserError) as caught:
        place(**job)
    assert what in caught.value.what and where in caught.value.where and fix in caught.value.fix


def test_distance_in_the_tree():
    tree = topology((Switch("top", ("s1", "s2")), Switch("s1", ("l1", "l2")), Switch("s2", ("l3",)),
                     Switch("l1", nodes=("a",)), Switch("l2", nodes=("b",)), Switch("l3", nodes=("c",))), list("cba"))
    assert tree.leaves == (("a",), ("b",), ("c",))
    assert [tree.distance(0, other) for other in range(3)] == [1, 3, 5]
    assert topology((), ["b", "a"]).leaves == (("a", "b"),)
