"""The RL step: its algebra, and the measured development points."""

from __future__ import annotations

import copy
from dataclasses import fields, replace

import pytest

from launch.accuracy import rl_steps as validation
from launch.accuracy.fit import median
from launch.accuracy.score import development_points
from launch.coefficients.rl import RlCoefficients
from launch.planner.parameters import tensor_count
from launch.planner.time.step import (
    Phases,
    combined_seconds,
    imbalance,
    overlapped_seconds,
    refit_seconds,
    rollout_seconds,
    step_seconds,
    training_passes,
)
from launch.planner.workload.lengths import Counted, LogNormal
from tests.planner.engines import LLAMA_8B, MOE
from tests.planner.problems import best, builtin, problem, workload

C = RlCoefficients()
PLAIN = C.changed({"train_efficiency": 1.0, "update_s": 0.0, "logprob_factor": 1.0, "rollout_efficiency": 1.0,
                   "response_s": 0.0, "other_share": 0.0})


@pytest.fixture(scope="module")
def points():
    return [point for point in development_points() if point.kind == "rl_steps"]


def errors_of(points, coefficients=C) -> dict[str, list[float]]:
    """Quantity -> errors, and `phases` for all but the whole step."""
    found: dict[str, list[float]] = {"phases": []}
    for point in points:
        for row in validation.predict(point, coefficients):
            if row.error is not None:
                found.setdefault(row.quantity, []).append(row.error)
                if row.quantity != "step_time_s":
                    found["phases"].append(row.error)
    return found


def test_without_losses_the_parts_stand_as_they_are():
    """A log-prob pass is the forward third of training; synchronous phases add up, asynchronous ones overlap."""
    passes = training_passes(30.0, 10.0, 4, coefficients=PLAIN)
    assert (passes.train_s, passes.pass_s, passes.ratio) == (120, 40, pytest.approx(1 / 3))
    assert rollout_seconds(50.0, 4096, PLAIN) == 50
    phases = Phases(rollout_s=50, train_s=120, logprob_s=40, reference_s=40, refit_s=3)
    assert step_seconds("synchronous", phases, PLAIN) == 253
    assert step_seconds("fully_async", phases, PLAIN) == step_seconds("one_step_off", phases, PLAIN) == 203
    assert step_seconds("fully_async", replace(phases, rollout_s=300), PLAIN) == 303
    beside = replace(phases, swap_s=1)          # the sync is the trainer's, and the engines stop for the swap
    assert step_seconds("fully_async", beside, PLAIN) == 203 and step_seconds("synchronous", beside, PLAIN) == 253
    assert step_seconds("fully_async", replace(beside, rollout_s=300), PLAIN) == 301


def test_what_the_update_hides_of_itself_behind_the_rollout():
    """Four parts of 10 s each: complete at once, evenly, or all at the end."""
    assert overlapped_seconds(100, 40, (0, 0, 0, 1)) == 110
    assert overlapped_seconds(100, 400, (0, 0, 0, 1)) == 400, "the trainer is never idle"
    assert overlapped_seconds(100, 40, (0.25, 0.5, 0.75, 1)) == 110
    assert overlapped_seconds(100, 40, (0.25, 0.95, 0.97, 1)) == 125, "three parts wait from second 95 on"
    assert overlapped_seconds(100, 40, (1, 1, 1, 1)) == 140
    assert combined_seconds(False, 100, 40, 5, 0.1, completions=(0, 0, 0, 1)) == pytest.approx(1.1 * 115)
    assert combined_seconds(True, 100, 40, 5, 0.0, completions=(0, 0, 0, 1)) == 105, "asynchronous: nothing to add"


def test_losses():
    """eta divides the computation, not the fixed part of an update; rho is forward / training x factor."""
    c = PLAIN.changed({"train_efficiency": 0.5, "update_s": 2.0, "mixture_efficiency": 0.5, "logprob_factor": 1.5,
                       "rollout_efficiency": 0.8, "response_s": 0.01, "other_share": 0.1})
    assert training_passes(30.0, 10.0, 4, coefficients=c).train_s == 4 * (60 + 2)
    assert training_passes(30.0, 10.0, 4, coefficients=c).ratio == pytest.approx(0.5)
    assert training_passes(30.0, 10.0, 4, coefficients=c, mixture=True).train_s == 4 * (120 + 2)
    assert training_passes(30.0, 10.0, 4, coefficients=c, uneven=1.5).train_s == 4 * (90 + 2)
    assert rollout_seconds(40.0, 1000, c) == 40 / 0.8 + 10
    assert step_seconds("synchronous", Phases(50, 50), c) == pytest.approx(110)


def test_imbalance_is_the_longest_sequence_over_a_rank_s_share():
    even = Counted.fixed(900)
    assert imbalance(even, 100, sequences=64, dp=8) == 1        # eight sequences a rank
    assert imbalance(even, 100, sequences=8, dp=8) == 1
    assert imbalance(even, 100, sequences=8, dp=16) == 2        # half of the ranks have nothing to do
    uneven = LogNormal(900, 1.0, 30_000)
    assert imbalance(uneven, 100, sequences=4096, dp=8) == 1
    assert imbalance(uneven, 100, sequences=512, dp=128) == pytest.approx((100 + uneven.expected_max(512)) / 4000)


def test_refit_counts_tensors():
    """Experts are tensors of their own: a mixture takes longer than a dense model of its size."""
    assert refit_seconds(60e9, tensor_count(MOE)) > 1.5 * refit_seconds(60e9, tensor_count(LLAMA_8B))


def test_bounds_hold_on_the_development_points(points):
    """25 % a phase and 20 % the total in the median, colocated and disaggregated apart."""
    colocated = errors_of([point for point in points if point.text("mode") == "colocated_sync"])
    apart = errors_of([point for point in points if point.text("mode") != "colocated_sync"])
    for found in (colocated, apart):
        assert median([abs(error) for error in found["step_time_s"]]) <= 0.20
        assert median([abs(error) for error in found["phases"]]) <= 0.25
    for quantity in ("rollout_time_s", "train_time_s", "logprob_time_s", "refit_time_s"):
        assert median([abs(error) for error in colocated[quantity]]) <= 0.25, quantity
    table = errors_of([point for point in points if point.regime == "nemo_rl_step_table"])["step_time_s"]
    assert len(table) == 8 and median([abs(error) for error in table]) <= 0.10


def test_the_shipped_coefficients_are_the_calibration(points):
    found = validation.calibrate(points, C)
    assert {each.name: getattr(found, each.name) for each in fields(found)} == pytest.approx(
        {each.name: getattr(C, each.name) for each in fields(C)}, rel=0.03)
    for name in ("train_efficiency", "logprob_factor", "rollout_efficiency"):
        assert getattr(C, f"{name}_low") < getattr(C, name) < getattr(C, f"{name}_high")


@pytest.mark.parametrize("regime", ["nemo_rl_step_table", "nemo_rl_sync_split"])
def test_a_source_that_took_no_part_is_predicted(points, regime):
    found = validation.calibrate([point for point in points if point.regime != regime], C)
    errors = errors_of([point for point in points if point.regime == regime], found)
    assert median([abs(error) for error in errors["step_time_s"]]) <= 0.20


def test_a_length_that_is_not_stated_is_assumed_and_said_so(points):
    known = next(point for point in points if point.number("mean_generated_tokens") == 1019)
    assert not any(row.reason for row in validation.predict(known, C))
    unknown = replace(known, data={**known.data, "mean_generated_tokens": None, "derived": None})
    rows = validation.predict(unknown, C)
    assert all(row.predicted and "1050 tokens assumed" in row.reason for row in rows)
    thinking = replace(unknown, model_name="qwen3-32b")         # no name of a model decides anything
    assert [row.predicted for row in validation.predict(thinking, C)] == [row.predicted for row in rows]
    # and teaches nothing
    assert validation.calibrate([*points, unknown], C) == validation.calibrate(points, C)


def test_measured_rates_are_no_inputs(points):
    """Tokens a second times GPUs times the step would be the answer."""
    for point in points:
        data = copy.deepcopy(dict(point.data)) | {"id": "x", "regime": "x", "source": {"repo": "x"}, "notes": "x"}
        data["measured"] = {name: value * 1.5 for name, value in data["measured"].items()}
        other = validation.predict(replace(point, id="x", regime="x", source="x", data=data), C)
        assert [(row.quantity, row.predicted) for row in other] == [
            (row.quantity, row.predicted) for row in validation.predict(point, C)]


def test_what_cannot_be_predicted_has_a_reason(points):
    refused = {row.reason for point in points for row in validation.predict(point, C) if row.predicted is None}
    assert len(refused) == 2 and any("not modelled" in each for each in refused)
    assert any("responses of a step" in each for each in refused)
    known = points[0]
    for change, reason in (({"mode": "sideways"}, "mode"), ({"max_seq_len": 200}, "mean response length"),
                           ({"rollout_parallelism": {"tp": 1}, "rollout_gpu_memory_utilization": 0.1},
                            "engine layout"),
                           ({"num_gpus_train": None, "hardware": {"gpu": "H100-SXM-80GB"}}, "number of GPUs")):
        rows = validation.predict(replace(known, data={**known.data, **change}), C)
        assert rows and all(row.predicted is None and reason in row.reason for row in rows), change


def test_null_fields_are_tolerated(points):
    for point in points:
        for name in ("parallelism", "rollout_parallelism", "max_seq_len", "global_batch", "samples_per_prompt",
                     "algorithm", "framework", "precision", "derived", "hardware", "measured",
                     "optimizer_steps_per_batch"):
            for value in (None, "not_stated"):
                for row in validation.predict(replace(point, data={**point.data, name: value}), C):
                    assert row.predicted is None or row.predicted > 0


def test_epochs_repeat_the_updates_and_not_the_passes():
    once, thrice = (best(problem(builtin("llama3-8b"), nodes=2, work=workload(logprob_pass=True, epochs=epochs)),
                         "colocated").training for epochs in (1, 3))
    assert thrice.layout == once.layout
    assert thrice.train_s == pytest.approx(3 * once.train_s) and thrice.logprob_s == pytest.approx(once.logprob_s)
