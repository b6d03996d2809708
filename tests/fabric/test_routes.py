"""Routes: coverage, slots, trees."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.coefficients.sync import DEFAULT
from launch.fabric.estimate import KINDS, RouteCost
from launch.fabric.lanes import Fabric, traffic
from launch.fabric.routes import ROOT, binary_tree, build, links, second_tree
from launch.plan.layouts import RolloutLayout, TrainingLayout
from tests.fabric.cases import FABRIC, LLAMA_70B, Case, check_coverage, traffics


@settings(max_examples=60, deadline=None)
@given(case=traffics(), kind=st.sampled_from(KINDS))
def test_every_byte_arrives_once(case: Case, kind):
    route = build(case.traffic, kind, 1 << 20)
    check_coverage(route, case)
    into = route.nic_bytes[1]
    for node_kind in case.traffic.kinds:            # one copy a node over the NICs
        for node in node_kind.nodes:
            assert sum(size for place, size in into.items() if place.node == node) == sum(node_kind.ingress)


@settings(max_examples=60, deadline=None)
@given(case=traffics(), kind=st.sampled_from(KINDS))
def test_the_quick_links_are_those_of_the_edges(case: Case, kind):
    route = build(case.traffic, kind, 1 << 20)
    assert links(case.traffic, kind) == route.links
    left = sum(edge.bytes for edge in route.edges if edge.parent == ROOT)
    assert RouteCost(kind, case.traffic, case.traffic.fabric, DEFAULT).sent_bytes == left


@settings(max_examples=60, deadline=None)
@given(case=traffics())
def test_no_nic_is_used_twice_in_a_slot(case: Case):
    route = build(case.traffic, "direct", 1 << 20)
    used: Counter = Counter()
    for edge in route.edges:
        if edge.via == "nic":
            used["out", route.nic(edge.source), edge.slot] += 1
            used["in", route.nic(edge.destination), edge.slot] += 1
    assert max(used.values()) == 1
    assert all(0 <= edge.slot < route.slots for edge in route.edges)


@settings(max_examples=30, deadline=None)
@given(case=traffics(), kind=st.sampled_from(KINDS))
def test_deterministic(case: Case, kind):
    assert build(case.traffic, kind, 1 << 20).fingerprint() == build(case.traffic, kind, 1 << 20).fingerprint()


def test_the_latin_square_of_the_notes():
    """TP8 PP4 DP4 to 16 engines: in slot s trainer node (p, g) sends to receiver 4g + ((p + s) mod 4)."""
    route = build(traffic(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=4), RolloutLayout(tp=8, replicas=16), FABRIC),
                  "direct", 256 << 20)
    large = [edge for edge in route.edges if edge.bytes > 1e9]
    assert {edge.slot for edge in large} == {0, 1, 2, 3} and len(large) == 8 * 16 * 4
    for edge in large:
        stage, group = divmod(edge.source.node, 4)
        assert edge.destination.node - 16 == 4 * group + (stage + edge.slot) % 4
        assert edge.source.gpu == edge.destination.gpu


def test_two_engines_on_a_node_share_its_nics():
    """TP4 x 32: 141 GB into a node over its NICs, the other half of each GPU's weights over NVLink."""
    route = build(traffic(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=4), RolloutLayout(tp=4, replicas=32), FABRIC),
                  "direct", 256 << 20)
    into = route.nic_bytes[1]
    assert max(into.values()) == pytest.approx(141.1e9 / 8, rel=0.002)
    nvlink = Counter()
    for edge in route.edges:
        if edge.via == "nvlink":
            nvlink[edge.destination] += edge.bytes
    assert max(nvlink.values()) == pytest.approx(141.1e9 / 8, rel=0.002)


@pytest.mark.parametrize("receivers", [*range(2, 40), 255, 256])
def test_two_trees(receivers):
    """Both reach everybody, no one forwards in both, and no one has more than two children."""
    first = binary_tree(receivers)
    second = second_tree(first)
    forwards = []
    for tree in (first, second):
        assert set(tree) == set(range(1, receivers + 1))
        children = Counter(tree.values())
        assert children.pop(0) == 1 and max(children.values()) <= 2
        forwards.append(set(children))
        depth = {0: 0}
        while len(depth) <= receivers:
            depth |= {node: depth[up] + 1 for node, up in tree.items() if up in depth}
        assert max(depth.values()) == receivers.bit_length()
    assert not forwards[0] & forwards[1]


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_forwarding_sends_one_copy_from_the_trainer(kind):
    moved = traffic(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=1), RolloutLayout(tp=8, replicas=28), FABRIC)
    route = build(moved, kind, 64 << 20)
    out, into = route.nic_bytes
    trainers = {place: size for place, size in out.items() if place.node < 4}
    assert sum(trainers.values()) == moved.replica_bytes
    assert max(out.values()) <= max(into.values()) * 1.01            # nobody sends more than it receives
    assert route.hops == {"chain": 28, "tree": 5}[kind]


def test_other_leaves_come_first():
    """Sender on leaf 0 with receivers on leaves 0, 1 and 2: the chain ends on the sender's own leaf and enters each
    leaf once."""
    fabric = Fabric(8, 8, 50e9, 450e9, 8, leaf_of_node=(0, 0, 1, 2, 1, 2, 0))
    moved = traffic(LLAMA_70B, TrainingLayout(tp=8), RolloutLayout(tp=8, replicas=6), fabric)
    route = build(moved, "chain", 64 << 20)
    on_rail = [edge for edge in route.edges if edge.source.gpu == edge.destination.gpu == 3 and edge.bytes > 1e9]
    nodes = [edge.destination.node for edge in sorted(on_rail, key=lambda edge: edge.hop)]
    assert [fabric.leaf(node) for node in nodes] == [1, 1, 2, 2, 0, 0]
    crossing = sum(edge.bytes for edge in route.edges
                   if fabric.leaf(edge.source.node) != fabric.leaf(edge.destination.node))
    assert crossing == pytest.approx(3 * 141.1e9, rel=0.01)
