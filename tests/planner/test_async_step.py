"""The plan's asynchronous step means what a run does: its formulas beside the run's own stream and scheduler, on
engines in virtual time (`benchmarks.async_scale`)."""

from __future__ import annotations

import pytest

from benchmarks.async_scale import Rates, Scale, drawn, in_virtual_time, play, rates_of
from launch.config.auto import on_this_machine
from launch.config.load import load_config
from launch.planner.prepare import OnCluster, prepare
from launch.planner.time.rollout import AsynchronousRollout, Demand, SynchronousRollout, mean_staleness
from launch.planner.time.step import combined_seconds
from launch.planner.workload.lengths import LogNormal
from tests.planner.problems import CONFIGS
from tests.planner.test_rollout_time import flat

TOKEN_S, PROMPTS, GROUP, ENGINES, SYNC_S = 0.01, 24, 4, 2, 0.2
LENGTHS = LogNormal(300, 0.5, 900)
ENGINE = flat(fixed_s=TOKEN_S)
ALGORITHM = on_this_machine(load_config(CONFIGS / "tiny/grpo.yaml").config).algorithm


def wanted(slots: int) -> Demand:
    return Demand(PROMPTS, GROUP, 0, LENGTHS, ENGINES, slots, 1e9)


def run(bound: int, slots: int, update_s: float, *, border: bool = False, steps: int = 40) -> Scale:
    rates = Rates(engines=ENGINES, slots=slots, max_num_seqs=slots, token_s=lambda running: TOKEN_S,
                  update_s=update_s, sync_s=SYNC_S, lengths=drawn(LENGTHS), cap=LENGTHS.cap, prompts=PROMPTS,
                  group=GROUP, prompt_tokens=1)
    return in_virtual_time(play(rates, ALGORITHM, bound, steps, border=border, looked_at=5))


@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("slots, update_s", [(64, 1.0), (32, 1.0), (64, 12.0)])
def test_engines_that_drain_take_a_synchronous_rollout_a_step_whatever_the_bound(bound, slots, update_s):
    rollout = SynchronousRollout(ENGINE, wanted(slots))
    predicted = combined_seconds(True, rollout.total_s, update_s, SYNC_S, 0.0, max_staleness=bound)
    found = run(bound, slots, update_s, border=True)
    assert found.step_s == pytest.approx(predicted, rel=0.04 if slots == 64 else 0.08)  # a queue is modelled to 10 %
    assert found.staleness_mean == found.staleness_max == bound


@pytest.mark.parametrize("bound, slots, update_s, sets", [
    (1, 64, 1.0, "longest"), (2, 64, 1.0, "longest"), (4, 24, 1.0, "rollout"), (3, 32, 8.0, "update")])
def test_engines_in_flight_run_full_unless_the_bound_or_the_update_sets_the_pace(bound, slots, update_s, sets):
    rollout = AsynchronousRollout(ENGINE, wanted(slots))
    parts = {"rollout": rollout.total_s + SYNC_S, "update": update_s + SYNC_S,
             "longest": (rollout.latency_max_s + update_s + SYNC_S) / (bound + 1)}
    assert max(parts, key=parts.__getitem__) == sets
    predicted = combined_seconds(True, rollout.total_s, update_s, SYNC_S, 0.0, rollout.latency_max_s, bound)
    assert predicted == pytest.approx(parts[sets])
    assert run(bound, slots, update_s).step_s == pytest.approx(predicted, rel=0.08)


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_samples_are_as_old_as_predicted(bound):
    """The trainer sets the pace, and engines have room."""
    update_s = 3.0 if bound > 1 else 6.0
    found = run(bound, 512, update_s)
    predicted = mean_staleness(LENGTHS, TOKEN_S, found.step_s - SYNC_S, bound)
    assert found.staleness_max == bound and found.staleness_mean == pytest.approx(predicted, abs=0.05 * bound)


def test_a_run_makes_the_planned_step_of_the_rates_of_the_70b_plan():
    """28 engines and 256 groups of 16: the scheduler keeps them as full as the plan takes them to be."""
    made = prepare("configs/70b/grpo.yaml")
    assert isinstance(made, OnCluster)
    rates, bound = rates_of(made), made.config.algorithm.max_staleness
    found = in_virtual_time(play(rates, made.config.algorithm, bound, 12, looked_at=11))
    assert (rates.update_s + rates.sync_s) * (1 - 1e-9) <= found.step_s <= made.plan.forecast.step_s
    assert found.staleness_max == bound == made.plan.forecast.staleness.versions
    assert found.staleness_mean == pytest.approx(made.plan.forecast.staleness.mean, abs=0.3)
