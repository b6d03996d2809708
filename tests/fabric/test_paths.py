"""Routes from node to node: trees have all bytes of the edges, and arrival times increase along a path."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.coefficients.sync import DEFAULT
from launch.fabric.estimate import KINDS
from launch.fabric.lanes import traffic
from launch.fabric.paths import Branch, trees
from launch.fabric.routes import build
from launch.fabric.simulate import arrivals, simulate
from launch.plan.layouts import RolloutLayout, TrainingLayout
from tests.fabric.cases import FABRIC, LLAMA_70B, traffics


def _all(branch: Branch):
    yield branch
    for child in branch.children:
        yield from _all(child)


@given(case=traffics(), kind=st.sampled_from(KINDS))
@settings(max_examples=25, deadline=None)
def test_every_byte_of_a_route_is_in_its_trees(case, kind):
    route = build(case.traffic, kind, 1 << 20)
    found = trees(route, arrivals(route, DEFAULT))
    branches = [each for tree in found for each in _all(tree)]
    assert sum(each.bytes for each in branches if each.via) == sum(edge.bytes for edge in route.edges)
    for kind_of_link in ("nic", "nvlink"):
        assert sum(each.bytes for each in branches if each.via == kind_of_link) == \
            sum(edge.bytes for edge in route.edges if edge.via == kind_of_link)
    assert {tree.node for tree in found} == {edge.source.node for edge in route.edges if edge.hop == 1}


@given(case=traffics(), kind=st.sampled_from(KINDS))
@settings(max_examples=25, deadline=None)
def test_every_edge_arrives_and_the_last_one_when_the_simulation_ends(case, kind):
    route = build(case.traffic, kind, 1 << 20)
    at = arrivals(route, DEFAULT)
    assert len(at) == len(route.edges) and min(at) > 0
    assert max(at) >= 0.98 * simulate(route, DEFAULT).wire_s       # which leaves out rails that look alike


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_arrival_is_the_time_of_the_whole_simulation(kind):
    moved = traffic(LLAMA_70B, TrainingLayout(tp=8, pp=4, dp=2), RolloutLayout(tp=4, replicas=24), FABRIC)
    route = build(moved, kind, 64 << 20)
    assert max(arrivals(route, DEFAULT)) == pytest.approx(simulate(route, DEFAULT).wire_s, rel=0.02)


def test_a_chain_is_one_line_and_a_tree_reaches_every_node_twice():
    """TP8 on one node to seven nodes: in a tree, half the bytes arrive on each path."""
    moved = traffic(LLAMA_70B, TrainingLayout(tp=8), RolloutLayout(tp=8, replicas=7), FABRIC)
    chain, = trees(*_with_times(build(moved, "chain", 64 << 20)))
    nodes, times, link = [], [], chain
    while link.children:
        link, = link.children
        nodes.append(link.node)
        times.append(link.seconds)
    assert nodes == [1, 2, 3, 4, 5, 6, 7]
    assert times == sorted(times) and times[-1] > times[0]      # what is passed on arrives later

    tree, = trees(*_with_times(build(moved, "tree", 64 << 20)))
    visits = [each for each in _all(tree) if each.via]
    assert sorted(each.node for each in visits) == sorted([*range(1, 8)] * 2)
    half = visits[0].bytes
    assert all(each.bytes == pytest.approx(half, rel=1e-6) for each in visits)
    assert len(tree.children) == 2


def _with_times(route):
    return route, arrivals(route, DEFAULT)
