"""The engines' GPU order against brute force and the trap of the notes."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.fabric import lanes
from launch.fabric.gpu_order import assign, engine_gpu_order
from launch.fabric.lanes import Fabric, traffic
from launch.plan.layouts import RolloutLayout, TrainingLayout
from tests.fabric.cases import FABRIC, LLAMA_70B, SMALL


def test_the_trap():
    """TP4 CP2: shard t is on GPUs t and t + 4, and ranks 2t and 2t + 1 of a TP8 engine need its halves."""
    training = TrainingLayout(tp=4, pp=4, cp=2, vpp=5, dp=5)
    assert engine_gpu_order(training, 8) == (0, 4, 1, 5, 2, 6, 3, 7)
    solved = traffic(LLAMA_70B, training, RolloutLayout(tp=8, replicas=12), FABRIC)
    natural = traffic(LLAMA_70B, training, RolloutLayout(tp=8, replicas=12), FABRIC, solve_order=False)
    total = 12 * solved.replica_bytes
    assert natural.crossing_bytes() == pytest.approx(0.75 * total, rel=0.01)       # six of eight ranks
    assert solved.crossing_bytes() < 0.001 * total                                 # vocabulary rows on borders


@pytest.mark.parametrize("training, engine_tp, order", [
    (TrainingLayout(tp=8, pp=4, dp=4), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
    (TrainingLayout(tp=4, pp=4, dp=8), 4, (0, 1, 2, 3, 4, 5, 6, 7)),
    (TrainingLayout(tp=8, pp=4, dp=4), 4, (0, 2, 4, 6, 1, 3, 5, 7)),
])
def test_other_orders(training, engine_tp, order):
    assert engine_gpu_order(training, engine_tp) == order


def test_one_rail_keeps_the_natural_order():
    assert engine_gpu_order(TrainingLayout(tp=4, cp=2), 8, rails=1) == tuple(range(8))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5).flatmap(lambda columns: st.lists(
    st.lists(st.integers(0, 9), min_size=columns, max_size=columns), min_size=1, max_size=columns)))
def test_assignment_is_the_first_of_the_best(costs):
    found = assign(costs)
    options = list(permutations(range(len(costs[0])), len(costs)))
    best = min(sum(costs[row][column] for row, column in enumerate(option)) for option in options)
    assert found == next(option for option in options
                         if sum(costs[row][column] for row, column in enumerate(option)) == best)


@settings(max_examples=12, deadline=None)
@given(tp=st.sampled_from((1, 2, 4)), cp=st.sampled_from((1, 2)), dp=st.integers(1, 3), pp=st.sampled_from((1, 2)),
       engine_tp=st.sampled_from((1, 2, 4)))
def test_no_permutation_keeps_more_on_its_rail(tp, cp, dp, pp, engine_tp):
    """Four GPUs a node, every permutation, bytes counted by the traffic itself. Norms and vocabulary rows on borders
    are not in the solver's fractions: 15 % of this tiny model's bytes are allowed for them."""
    training, rollout = TrainingLayout(tp=tp, cp=cp, dp=dp, pp=pp), RolloutLayout(tp=engine_tp, replicas=4)
    fabric = Fabric(4, 4, 50e9, 450e9, 4)
    solved = traffic(SMALL, training, rollout, fabric)
    total = sum(sum(kind.ingress) * len(kind.nodes) for kind in solved.kinds)
    least = min(_crossing(training, rollout, fabric, order) for order in permutations(range(4)))
    assert solved.crossing_bytes() <= least + 0.15 * total


def _crossing(training, rollout, fabric, order):
    moved = lanes.flows(SMALL, training, rollout)
    kinds = lanes._kinds(moved, rollout.tp, rollout.pp, rollout.replicas, -(-training.gpus // 4), order, 4, 4, 4)
    return lanes.assemble(fabric, training, kinds, order, 0).crossing_bytes()
