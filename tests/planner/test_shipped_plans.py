"""The numbers of the shipped plans, as they were when the golden file was last refreshed on purpose. A change of the
planner that is meant to leave them alone does; one that is not shows here what it moved.

Refresh: `python -m tests.planner.test_shipped_plans`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.plan.forecast import Forecast
from launch.planner.explain.forecast import forecast
from launch.planner.planning import best_of
from launch.planner.prepare import posed
from launch.planner.search.candidate import Candidate
from tests.planner.problems import CONFIGS, loaded

GOLDEN = Path(__file__).parent / "golden" / "plans.json"
SHIPPED = sorted(path.relative_to(CONFIGS).as_posix()
                 for folder in ("7b", "70b") for path in (CONFIGS / folder).glob("*.yaml"))


def numbers(found: Candidate, predicted: Forecast) -> dict[str, Any]:
    """A few dozen figures of a plan: sizes, memory, times, rates."""
    training, rollout = found.training.layout, found.rollout.layout
    return {
        "nodes": [predicted.split.training, predicted.split.rollout, predicted.split.spare],
        "trainer": [training.tp, training.pp, training.vpp, training.cp, training.dp, training.ep],
        "recompute": list(training.recompute), "token_budget": found.problem.token_budget,
        "engines": [rollout.tp, rollout.replicas, rollout.max_num_seqs],
        "memory": {row.name: row.total for row in predicted.memory},
        "phases": {phase.name: [phase.seconds, phase.low, phase.high] for phase in predicted.phases},
        "step_s": [predicted.step_s, predicted.step_low_s, predicted.step_high_s],
        "prompts_per_hour": predicted.throughput.nominal,
        "rollout": [predicted.rollout.tpot_s, predicted.rollout.in_flight, predicted.rollout.capacity,
                    predicted.rollout.longest_s],
        "staleness": [predicted.staleness.versions, predicted.staleness.mean],
        "sync": {route.route: route.expected_s for route in predicted.sync.routes} | {
            "chosen": predicted.sync.chosen, "payload": predicted.sync.payload_bytes,
            "order": list(predicted.sync.gpu_order)},
        "reliability": [predicted.reliability.job_mtbf_hours, predicted.reliability.checkpoint_s,
                        predicted.reliability.effective_time_ratio],
        "warnings": [warned.code for warned in predicted.warnings]}


def of(name: str) -> dict[str, Any]:
    """The figures of a shipped configuration, planned for its own cluster."""
    _, found = best_of(posed(loaded(name)))
    return numbers(found, forecast(None, found, {}))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_numbers_are_those_of_before(name):
    assert close(of(name), json.loads(GOLDEN.read_text(encoding="utf-8"))[name]), \
        "if this change is meant: python -m tests.planner.test_shipped_plans"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_clip_acts_where_samples_are_two_versions_old(name):
    versions, _ = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]["staleness"]
    assert versions < 2 or loaded(name).config.algorithm.old_logprobs == "interpolate"


def close(now: Any, before: Any) -> bool:
    """Equal, floats up to the rounding of another machine's libm."""
    if isinstance(before, dict):
        return now.keys() == before.keys() and all(close(now[key], before[key]) for key in before)
    if isinstance(before, list):
        return len(now) == len(before) and all(map(close, now, before))
    return now == (pytest.approx(before, rel=1e-9) if isinstance(before, float) else before)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: of(name) for name in SHIPPED}, indent=1) + "\n", encoding="utf-8")
