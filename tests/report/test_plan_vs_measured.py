"""Plan against measured: medians recomputed here, labels, reasons."""

from __future__ import annotations

import json
import statistics

import pytest

from launch.plan.forecast import RewardForecast
from launch.planner.calibrate.measured import FEWEST, WARM_UP, PlanVsMeasured, compare
from launch.report.run.plan_vs_measured import comparison_html, comparison_text, of_attempt
from tests.report.plan_example import example_plan

TIMES = {"rollout": 80.0, "reward": 5.0, "logprob": 11.0, "train": 64.0, "sync": 2.5, "other": 1.0}


def rows(count: int = 9, *, response: float = 2000.0, **times: float) -> list[dict]:
    """Steps whose times rise by 1 % each, the first two ten times as long."""
    found = []
    for step in range(1, count + 1):
        scale = (10 if step <= 2 else 1) * 1.01 ** step
        parts = {f"time/{name}": seconds * scale for name, seconds in {**TIMES, **times}.items()}
        found.append({"step": step, **parts, "time/step": sum(parts.values()),
                      "response/length_mean": response + step,
                      "prompt/length_mean": 512.0, "throughput/tokens_per_s": 1e6 / sum(parts.values())})
    return found


@pytest.fixture
def forecast():
    return example_plan(asynchronous=False).forecast


def test_each_phase_has_the_median_of_its_metric_after_the_warm_up(forecast):
    made = rows()
    found = compare(forecast, made)
    predicted = {phase.name: phase for phase in forecast.phases}
    for each in found.phases:
        metrics = {"rollout": ("time/rollout",), "reward": ("time/reward",), "log-prob": ("time/logprob",),
                   "train": ("time/train",), "sync": ("time/sync",), "step": ("time/step",)}[each.name]
        times = [sum(row[name] for name in metrics) for row in made[2:]]
        assert each.measured.median == pytest.approx(statistics.median(times), rel=1e-12)
        assert (each.measured.lowest, each.measured.highest) == (min(times), max(times))
        assert each.ratio == pytest.approx(each.measured.median / each.predicted.seconds)
        assert each.in_range == (each.predicted.low <= each.measured.median <= each.predicted.high)
    by_name = {each.name: each.predicted for each in found.phases}
    assert by_name["train"].seconds == predicted["train"].seconds and by_name["step"].seconds == forecast.step_s
    assert by_name["step"].low == forecast.step_low_s
    steps = found.steps
    assert (steps.first, steps.last, steps.count, steps.left_out) == (3, 9, 7, WARM_UP)


def test_log_prob_passes_stand_together_as_they_are_measured(forecast):
    passes = [phase for phase in forecast.phases if phase.name in ("logprob", "reference")]
    found = {each.name: each for each in compare(forecast, rows()).phases}
    assert ("log-prob" in found) == bool(passes)
    first = forecast.phases[0]
    twice = forecast.model_copy(update={
        "phases": tuple(first.model_copy(update={"name": name}) for name in ("logprob", "reference"))})
    both = next(each for each in compare(twice, rows()).phases if each.name == "log-prob")
    assert both.predicted.seconds == pytest.approx(2 * first.seconds)


def test_a_wrong_length_is_named_as_the_cause(forecast):
    given = {number.key: number for number in forecast.numbers}
    assumed = 2048.0
    numbers = [number for number in forecast.numbers if number.key != "workload.response_mean"]
    model = next(iter(given.values()))
    numbers.append(model.model_copy(update={"key": "workload.response_mean", "value": assumed}))
    known = forecast.model_copy(update={"numbers": tuple(numbers)})
    right, wrong = compare(known, rows(response=assumed)), compare(known, rows(response=2 * assumed))
    assert not any("tokens long" in note for note in right.notes)
    note = next(note for note in wrong.notes if note.startswith("responses"))
    assert "2048 were assumed" in note and "workload.response.mean=4102" in note
    length = next(each for each in wrong.lengths if each.name == "response")
    assert length.assumed == assumed
    assert length.measured == pytest.approx(statistics.fmean(range(3, 10)) + 2 * assumed)


def test_a_phase_far_off_with_right_lengths_points_at_the_calibration(forecast):
    quiet = forecast.model_copy(update={"numbers": ()})
    far = compare(quiet, rows(train=1e5))
    assert any("train" in note and "plan calibrate" in note for note in far.notes)


def test_rewards_that_cost_something_else_are_named(forecast):
    assumed = RewardForecast(nodes=2, processes=16, sample_s=0.01, busy_s=2.0, behind_s=0.0)
    known = forecast.model_copy(update={"reward": assumed})
    notes = {cost: [note for note in compare(known, rows(reward_sample=cost)).notes if "reward process" in note]
             for cost in (0.004, 0.006, 0.018, 0.05)}
    assert not notes[0.006] and not notes[0.018] and notes[0.004]
    assert "0.01 s were assumed: workload.reward_s=0.053 predicts this run" in notes[0.05][0]


def overlapping(*, waited: float, step: float = 95.0, train: float = 64.0) -> list[dict]:
    """Steps of an asynchronous run: engines generate all the time, but for half a second."""
    return [{"step": step_, "time/step": step, "time/rollout": waited, "time/reward": 0.1, "time/train": train,
             "time/logprob": 11.0, "time/sync": 2.5, "time/rollout_hidden": step - 0.5 - waited,
             "sync/pause_seconds": 1.5, "idle/trainer": waited / step, "idle/engines": 0.5 / step,
             "staleness/mean": 3.5, "staleness/max": 5.0} for step_ in range(1, 8)]


def test_an_asynchronous_run_is_compared_by_what_it_waits_for_hides_and_stops():
    """The prediction by hand: the trainer's phases, and a longest completion of several steps."""
    forecast = example_plan().forecast
    other = 0.05
    share = forecast.numbers[0].model_copy(update={"key": "coefficients.rl.other_share", "value": other})
    sync = forecast.sync.model_copy(update={"pauses": {"in_place": 2.0}})
    forecast = forecast.model_copy(update={"numbers": (*forecast.numbers, share), "sync": sync})
    seconds = {phase.name: phase.seconds for phase in forecast.phases}
    trains = sum(seconds[name] for name in seconds if name not in ("rollout", "reward"))
    assert forecast.rollout.longest_s > forecast.step_s > (1 + other) * trains
    found = compare(forecast, overlapping(waited=15.0))
    each = {phase.name: phase for phase in found.phases}
    assert list(each)[:3] == ["waited", "hidden", "pause"] and "rollout" not in each
    assert each["waited"].predicted.seconds == pytest.approx(forecast.step_s - (1 + other) * trains)
    assert each["waited"].measured.median == pytest.approx(15.1)
    assert each["waited"].predicted.seconds + each["hidden"].predicted.seconds == pytest.approx(forecast.step_s)
    assert each["hidden"].measured.median == pytest.approx(95 - 0.5 - 15)
    assert each["pause"].predicted.seconds == 2.0 and each["pause"].measured.median == 1.5
    for phase in found.phases:
        assert phase.predicted.low <= phase.predicted.seconds <= phase.predicted.high
    notes = "\n".join(found.notes)
    assert f"trainer {each['waited'].predicted.seconds / forecast.step_s:.0%} predicted, 16% measured" in notes
    assert "engines 0% predicted, 1% measured" in notes
    assert "at most 5, mean 1.6 predicted; at most 5, mean 3.5 measured" in notes
    text = comparison_text(found)
    assert max(map(len, text.splitlines())) <= 100 and "waited" in text and "hidden" in comparison_html(found)


def test_a_trainer_that_is_predicted_never_to_wait_has_no_ratio():
    forecast = example_plan().forecast
    phases = tuple(phase.model_copy(update={"seconds": 2 * forecast.step_s} if phase.name == "train" else {})
                   for phase in forecast.phases)
    found = compare(forecast.model_copy(update={"phases": phases}), overlapping(waited=0.0))
    waited = found.phases[0]
    assert (waited.name, waited.predicted.seconds, waited.ratio) == ("waited", 0.0, None)
    line = next(line for line in comparison_text(found).splitlines() if line.split()[:1] == ["waited"])
    assert line.split()[-1] == "-" or line.endswith("-, not in range")
    far = next(note for note in found.notes if "plan calibrate" in note)
    assert "algorithm.max_staleness=0" in far


@pytest.mark.parametrize("count", range(WARM_UP + FEWEST))
def test_a_run_that_is_too_short_says_so(forecast, count):
    found = compare(forecast, rows(count))
    assert found.steps is None and found.phases == ()
    assert f"{count} step" in found.nothing and "compared from 5 on" in found.nothing
    assert found.nothing.split(":")[0] in comparison_text(found) and "Not compared" in comparison_html(found)
    assert compare(forecast, rows(WARM_UP + FEWEST)).phases


def test_a_plan_without_a_forecast_says_so():
    assert "no forecast" in compare(None, rows()).nothing


def test_an_attempt_is_compared_from_its_folder_and_one_without_a_plan_is_not(tmp_path):
    plan = example_plan(asynchronous=False)
    assert of_attempt(tmp_path) is None
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    assert of_attempt(tmp_path).nothing is not None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    found = of_attempt(tmp_path)
    assert found == compare(plan.forecast, rows())
    assert PlanVsMeasured.model_validate_json(found.model_dump_json()) == found
    (tmp_path / "plan.json").write_text("{}")
    assert of_attempt(tmp_path) is None


def test_predicted_and_measured_are_labelled_and_fit_the_terminal(forecast):
    found = compare(forecast, rows(response=9000.0))
    text, html = comparison_text(found), comparison_html(found)
    assert max(map(len, text.splitlines())) <= 100
    head = text.splitlines()[1]
    assert head.index("predicted") < head.index("range") < head.index("measured")
    train = next(line for line in text.splitlines() if line.split()[0] == "train")
    each = next(each for each in found.phases if each.name == "train")
    assert train.index(f"{each.predicted.seconds:.3g} s") < train.index(f"{each.measured.median:.3g} s")
    assert "<th class=\"n\">predicted</th>" in html and "<th class=\"n\">measured median</th>" in html
    assert html.count("<tr><td>") == len(found.phases) + len(found.lengths)


def test_text_from_files_is_escaped(forecast):
    found = compare(forecast, rows()).model_copy(update={"notes": ("<script>x</script>",)})
    assert "<script>" not in comparison_html(found)
