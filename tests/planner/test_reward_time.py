"""Grading beside generation: what is left of it, against a queue that is played through; and what the plan says."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from launch.coefficients.reward import RewardCoefficients
from launch.planner.explain.forecast import forecast
from launch.planner.explain.warnings import MAX_BEHIND, cautions
from launch.planner.prepare import prepare
from launch.planner.search.candidate import Candidate
from launch.planner.time.reward import RewardTime, behind_seconds
from tests.planner.problems import best, problem, workload

PARTS, SAMPLES = 8, 8000


def _played(rollout_s: float, sample_s: float, processes: int, completions: list[float]) -> float:
    """When the last completion is graded: each goes to the process that is free first. A part's completions come evenly
    between the end of the part before and its own."""
    arrivals = []
    for before, end in zip([0.0, *completions], completions, strict=False):
        each = SAMPLES // len(completions)
        arrivals += [(before + (end - before) * (index + 1) / each) * rollout_s for index in range(each)]
    free = [0.0] * processes
    for arrives in arrivals:
        heapq.heappush(free, max(heapq.heappop(free), arrives) + sample_s)
    return max(free)


@pytest.mark.parametrize("load", [0.05, 0.5, 0.95, 1.5, 4.0])
@pytest.mark.parametrize("shape", ["even", "late", "all at the end", "random"])
def test_what_is_left_of_the_grading_is_that_of_a_queue(load, shape):
    rng = random.Random(1)
    completions = {"even": [(j + 1) / PARTS for j in range(PARTS)],
                   "late": [((j + 1) / PARTS) ** 0.25 for j in range(PARTS)],
                   "all at the end": [1.0] * PARTS,
                   "random": sorted([rng.random() for _ in range(PARTS - 1)] + [1.0])}[shape]
    rollout_s, processes = 100.0, 16
    busy_s = load * rollout_s
    sample_s = busy_s * processes / SAMPLES
    left_s = _played(rollout_s, sample_s, processes, completions) - rollout_s
    predicted_s = behind_seconds(rollout_s, busy_s, completions)
    # A part of the work comes before its end is known; a completion is graded by one process.
    assert predicted_s - 1e-6 <= left_s <= predicted_s + busy_s / PARTS + sample_s
    if shape == "all at the end":
        assert predicted_s == pytest.approx((1 - 1 / PARTS) * busy_s)


def test_without_an_end_of_a_step_only_the_rate_counts():
    assert behind_seconds(10.0, 9.9, ()) == 0.0 and behind_seconds(10.0, 12.5, ()) == 2.5


def _time(**changes) -> RewardTime:
    work = workload(math_rewards=1, group=16, **changes.pop("work", {}))
    given = {"workers": 8, "nodes": 4, "rollout_s": 50.0, "completions": (0.5, 1.0)} | changes
    return RewardTime(workload=work, c=RewardCoefficients(), **given)


def test_the_seconds_of_a_completion():
    c, work = RewardCoefficients(), workload()
    assert _time().sample_s == c.sample_s + c.math_s
    texts = _time(work={"text_rewards": 2, "own_rewards": 1})
    assert texts.sample_s == pytest.approx(c.sample_s + c.math_s + 2 * c.token_s * work.lengths.mean + c.user_s)
    assert _time(work={"reward_s": 0.5}).sample_s == 0.5
    assert _time().busy_s == pytest.approx(64 * 16 * _time().sample_s / 32)
    assert _time().last_s == pytest.approx(2 * _time().sample_s + c.call_s), "16 completions, 8 processes of a node"
    low, high = _time().spread
    assert low < _time().sample_s < high


def _found(asynchronous: bool = False, nodes: int = 3, workers: int = 4, **work) -> Candidate:
    return best(problem(nodes=nodes, asynchronous=asynchronous, work=workload(**({"math_rewards": 1} | work)),
                        reward_workers=workers))


def _warned(found: Candidate) -> dict[str, str]:
    return {each.code: each.message for each in cautions(found, 1.0, 2.0)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cheap_rewards_hide_behind_the_rollout_and_dear_ones_set_the_pace(asynchronous):
    cheap = _found(asynchronous)
    assert cheap.reward.behind_s == 0 and "W020" not in _warned(cheap)
    free = replace(cheap, problem=replace(cheap.problem, workload=replace(cheap.problem.workload, reward_s=1e-9)))
    most_s = cheap.reward.last_s * 1.1
    assert free.step_s <= cheap.step_s <= free.step_s + (0 if asynchronous else most_s)

    dear = _found(asynchronous, reward_s=10 * cheap.rollout.seconds / cheap.reward.busy_s * cheap.reward.sample_s)
    busy_s = 64 * 8 * dear.reward.sample_s / (4 * dear.training_nodes)
    assert dear.reward.busy_s == pytest.approx(busy_s) and dear.step_s > busy_s > dear.rollout.seconds
    assert "rewards set the pace" in _warned(dear)["W020"]
    shown = forecast(None, dear, {})
    assert shown.bottleneck.startswith("rewards") and shown.reward.busy_s == dear.reward.busy_s
    (phase,) = (each for each in shown.phases if each.name == "reward")
    assert phase.low < phase.seconds < phase.high and phase.seconds > busy_s - dear.rollout.seconds


def test_the_remedy_is_the_least_that_helps():
    found = _found(reward_s=1.0)
    needed = found.reward.workers_needed(MAX_BEHIND * found.step_s)
    assert f"reward.workers={needed} hides it" in _warned(found)["W020"]

    def behind_s(workers: int) -> float:
        return replace(found, problem=replace(found.problem, reward_workers=workers)).reward.behind_s

    assert behind_s(needed) <= MAX_BEHIND * found.step_s < behind_s(needed - 1)


def test_the_time_of_a_function_of_the_users_is_assumed_until_it_is_given():
    own = ("reward.functions.0.function=my.rewards:polite",)
    assert "W021" in {each.code for each in prepare("configs/7b/grpo.yaml", own).plan.forecast.warnings}
    told = prepare("configs/7b/grpo.yaml", (*own, "workload.reward_s=0.05")).plan.forecast
    assert not {"W020", "W021"} & {each.code for each in told.warnings}
    assert told.reward.sample_s == 0.05 and told.reward.processes == 4 * told.split.training
    assert told.reward.busy_s == pytest.approx(128 * 8 * 0.05 / told.reward.processes)
    assert {each.key: each.value for each in told.numbers}["workload.reward_s"] == 0.05
    (phase,) = (each for each in told.phases if each.name == "reward")
    assert phase.seconds == pytest.approx(2 * 0.05 + RewardCoefficients().call_s)
