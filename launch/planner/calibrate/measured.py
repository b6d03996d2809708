"""Predicted and measured times of a run, side by side. Every number is labelled as one or the other.

    rollout    predicted: generation, and host work per response             measured: time/rollout + _hidden
    reward     predicted: from the last completion to the last score         measured: time/reward
    log-prob   predicted: passes for old, reference and teacher log-probs    measured: time/logprob
    train      predicted: all optimizer steps                                measured: time/train
    sync       predicted: the weight sync                                    measured: time/sync
    step       predicted: the whole step                                     measured: time/step

The phases of an asynchronous run overlap. Rollout is then compared by what it means for the step:

    waited     predicted: the step less log-probs, training and sync         measured: time/rollout + time/reward
    hidden     predicted: generation beside other work. A batch is under     measured: time/rollout_hidden
               way for the seconds of its longest completion, or for those
               of its rollout if these are more, and at most all the time
    pause      predicted: the engines stop for the sync                      measured: sync/pause_seconds
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from launch.plan.forecast import Forecast, Record
from launch.run.metrics import Row, series

SCHEMA_VERSION = 1
WARM_UP = 2
"""Steps at the start of an attempt that are left out, because engines and allocators warm up."""
FEWEST = 3
"""Minimum number of steps after the warm-up for a median."""
GRADING_TOLERANCE = 2.0
"""The seconds of a completion's reward are named as a cause if they differ by more than this factor."""
LENGTH_TOLERANCE = 0.1
"""A length with a larger relative difference is named as a cause."""


@dataclass(frozen=True)
class Kind:
    """A phase: its names in the prediction and in the measurement."""

    name: str
    predicted: tuple[str, ...]
    """Names of `Forecast.phases`, summed."""
    metrics: tuple[str, ...]
    """Metrics, summed step by step."""


KINDS = (Kind("rollout", ("rollout",), ("time/rollout", "time/rollout_hidden")),
         Kind("reward", ("reward",), ("time/reward",)),
         Kind("log-prob", ("logprob", "reference", "teacher"), ("time/logprob",)),
         Kind("train", ("train",), ("time/train",)),
         Kind("sync", ("sync",), ("time/sync",)))
WAITED, HIDDEN, PAUSE = ("time/rollout", "time/reward"), ("time/rollout_hidden",), ("sync/pause_seconds",)
"""Metrics of the rollout of an asynchronous run."""


class PredictedSeconds(Record):
    """Seconds that the plan predicted before the run."""

    seconds: float
    low: float
    high: float


class Measured(Record):
    """Seconds that the run took, over the steps of `PlanVsMeasured.steps`."""

    median: float
    lowest: float
    highest: float
    metrics: tuple[str, ...]
    """Names in metrics.jsonl. Several metrics are summed in each step."""


class PhaseComparison(Record):
    name: str
    predicted: PredictedSeconds
    measured: Measured
    ratio: float | None
    """Measured over predicted; null if nothing was predicted."""
    in_range: bool
    """Whether the measured median is in the predicted range."""


class Length(Record):
    """A length in tokens, as assumed by the plan and as measured in the run."""

    name: str
    """`prompt` or `response` (means), or `step` (prompt and response tokens of all sequences)."""
    assumed: float
    measured: float
    """Mean over the steps."""
    ratio: float
    """Measured over assumed."""


class Steps(Record):
    """The steps that were measured."""

    first: int
    last: int
    count: int
    left_out: int
    """Number of warm-up steps of the attempt."""


class PlanVsMeasured(Record):
    """`plan-vs-measured.json` of an attempt."""

    schema_version: int = SCHEMA_VERSION
    steps: Steps | None
    phases: tuple[PhaseComparison, ...]
    lengths: tuple[Length, ...]
    notes: tuple[str, ...]
    """Explanations of differences."""
    nothing: str | None = None
    """The reason if there is no comparison; null if there is one."""


def steady(rows: Sequence[Row]) -> list[Row]:
    """The training steps of one attempt after its warm-up."""
    return [row for row in rows if "time/step" in row][WARM_UP:]


def seconds(rows: Sequence[Row], metrics: Iterable[str]) -> list[float]:
    """The sum of these metrics in each step that has any of them."""
    names = tuple(metrics)
    return [sum(row.get(name, 0.0) for name in names) for row in rows if any(name in row for name in names)]


def compare(forecast: Forecast | None, rows: Sequence[Row], no_forecast: str = "") -> PlanVsMeasured:
    """The plan compared with the metrics of one attempt. Pure.

    Args:
        no_forecast: the reason if the plan has no forecast.
    """
    measured = steady(rows)
    if forecast is None:
        return _nothing("the plan of this attempt has no forecast" + (f": {no_forecast}" if no_forecast else ""))
    if len(measured) < FEWEST:
        made = len([row for row in rows if "time/step" in row])
        return _nothing(f"{made} step{'s' * (made != 1)}: plan and measurement are compared from {WARM_UP + FEWEST} "
                        f"on, since the first {WARM_UP} are warm-up and a median needs {FEWEST}")
    kinds = KINDS[2:] if forecast.asynchronous else KINDS
    phases = [found for kind in kinds if (found := _phase(kind, forecast, measured))]
    if forecast.asynchronous:
        phases[:0] = _overlapping(forecast, measured)
    step = PredictedSeconds(seconds=forecast.step_s, low=forecast.step_low_s, high=forecast.step_high_s)
    phases.append(_comparison("step", step, seconds(measured, ("time/step",)), ("time/step",)))
    lengths = _lengths(forecast, measured)
    steps = Steps(first=int(measured[0]["step"]), last=int(measured[-1]["step"]), count=len(measured),
                  left_out=WARM_UP)
    return PlanVsMeasured(steps=steps, phases=tuple(phases), lengths=lengths,
                          notes=tuple(_notes(phases, lengths, forecast, measured)))


def _nothing(why: str) -> PlanVsMeasured:
    return PlanVsMeasured(steps=None, phases=(), lengths=(), notes=(), nothing=why)


def _phase(kind: Kind, forecast: Forecast, rows: Sequence[Row]) -> PhaseComparison | None:
    """The comparison of a phase; None if the recipe does not have it."""
    parts = [phase for phase in forecast.phases if phase.name in kind.predicted]
    times = seconds(rows, kind.metrics)
    if not parts or not times:
        return None
    predicted = PredictedSeconds(seconds=sum(part.seconds for part in parts), low=sum(part.low for part in parts),
                                 high=sum(part.high for part in parts))
    return _comparison(kind.name, predicted, times, kind.metrics)


def _overlapping(forecast: Forecast, rows: Sequence[Row]) -> list[PhaseComparison]:
    """What an asynchronous run waits for, hides and stops."""
    waited, hidden = _waited(forecast), _hidden(forecast)
    found = [_comparison("waited", waited, seconds(rows, WAITED), WAITED),
             _comparison("hidden", hidden, seconds(rows, HIDDEN), HIDDEN)]
    pause = forecast.sync.pauses.get(forecast.sync.staging)
    if pause and (times := seconds(rows, PAUSE)):
        sync = next(phase for phase in forecast.phases if phase.name == "sync")
        spread = PredictedSeconds(seconds=pause, low=pause * sync.low / sync.seconds,
                                  high=pause * sync.high / sync.seconds)
        found.append(_comparison("pause", spread, times, PAUSE))
    return found


def _waited(forecast: Forecast) -> PredictedSeconds:
    """The step less what the trainer does in it. Both ends of the range: the others at their other end."""
    others = [phase for phase in forecast.phases if phase.name not in ("rollout", "reward")]
    share = 1 + next((number.value for number in forecast.numbers if number.key == "coefficients.rl.other_share"), 0.0)
    return PredictedSeconds(
        seconds=max(0.0, forecast.step_s - share * sum(phase.seconds for phase in others)),
        low=max(0.0, forecast.step_low_s - share * sum(phase.high for phase in others)),
        high=max(0.0, forecast.step_high_s - share * sum(phase.low for phase in others)))


def _hidden(forecast: Forecast) -> PredictedSeconds:
    rollout = next(phase for phase in forecast.phases if phase.name == "rollout")
    under_way = max(forecast.rollout.longest_s, rollout.seconds)
    low, high = (under_way * end / rollout.seconds for end in (rollout.low, rollout.high))
    waited = _waited(forecast)
    return PredictedSeconds(seconds=max(0.0, min(forecast.step_s, under_way) - waited.seconds),
                            low=max(0.0, min(forecast.step_low_s, low) - waited.high),
                            high=max(0.0, min(forecast.step_high_s, high) - waited.low))


def _comparison(name: str, predicted: PredictedSeconds, times: Sequence[float],
                metrics: tuple[str, ...]) -> PhaseComparison:
    middle = median(times)
    return PhaseComparison(
        name=name, predicted=predicted, ratio=middle / predicted.seconds if predicted.seconds else None,
        measured=Measured(median=middle, lowest=min(times), highest=max(times), metrics=metrics),
        in_range=predicted.low <= middle <= predicted.high)


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a metric over the steps that have it."""
    _, values = series(rows, name)
    return fmean(values) if values else None


def _lengths(forecast: Forecast, rows: Sequence[Row]) -> tuple[Length, ...]:
    given = {number.key: number.value for number in forecast.numbers if number.key.startswith("workload.")}
    response, prompt = given.get("workload.response_mean"), given.get("workload.prompt_tokens")
    step = None
    if response and prompt:
        step = given["workload.prompts"] * given["workload.group"] * (prompt + response)
    tokens = [row["throughput/tokens_per_s"] * row["time/step"] for row in rows if "throughput/tokens_per_s" in row]
    pairs = (("prompt", prompt, mean_of(rows, "prompt/length_mean")),
             ("response", response, mean_of(rows, "response/length_mean")),
             ("step", step, fmean(tokens) if tokens else None))
    return tuple(Length(name=name, assumed=assumed, measured=found, ratio=found / assumed)
                 for name, assumed, found in pairs if assumed and found)


def _grading(forecast: Forecast, rows: Sequence[Row]) -> Iterable[str]:
    """What a completion costs a reward process, if the plan assumed something else."""
    measured_s = mean_of(rows, "time/reward_sample")
    if forecast.reward is None or not measured_s:
        return
    assumed_s = forecast.reward.sample_s
    if not 1 / GRADING_TOLERANCE < measured_s / assumed_s < GRADING_TOLERANCE:
        yield (f"a completion took a reward process {measured_s:.2g} s, {assumed_s:.2g} s were assumed: "
               f"workload.reward_s={measured_s:.2g} predicts this run")


def _notes(phases: Sequence[PhaseComparison], lengths: Sequence[Length], forecast: Forecast,
           rows: Sequence[Row]) -> Iterable[str]:
    if forecast.asynchronous:
        yield from _asynchronous_notes(forecast, rows)
    keys = {"response": "workload.response.mean", "prompt": "workload.prompt_tokens"}
    explains = {"response": "rollout and training", "prompt": "prefill and training"}
    wrong = [each for each in lengths if each.name in keys and abs(each.ratio - 1) > LENGTH_TOLERANCE]
    for each in wrong:
        yield (f"{each.name}s were {each.measured:.4g} tokens long, {each.assumed:.4g} were assumed: "
               f"{explains[each.name]} were predicted for other lengths; "
               f"{keys[each.name]}={each.measured:.4g} predicts this run")
    yield from _grading(forecast, rows)
    far = [phase.name for phase in phases if not phase.in_range and phase.name not in ("step", "reward")]
    if far and not wrong:
        fits = ("`megatron-rl plan calibrate` fits the site's coefficients to a run with algorithm.max_staleness=0"
                if forecast.asynchronous else
                "`megatron-rl plan calibrate` fits the site's coefficients to this run")
        yield f"{', '.join(far)} outside the predicted range, with lengths as assumed: {fits}"


def _asynchronous_notes(forecast: Forecast, rows: Sequence[Row]) -> Iterable[str]:
    step_s, waited, hidden = forecast.step_s, _waited(forecast).seconds, _hidden(forecast).seconds
    idle = [mean_of(rows, name) for name in ("idle/trainer", "idle/engines")]
    if None not in idle:
        yield (f"idle: trainer {waited / step_s:.0%} predicted, {idle[0]:.0%} measured; engines "
               f"{max(0.0, 1 - (waited + hidden) / step_s):.0%} predicted, {idle[1]:.0%} measured")
    ages = [mean_of(rows, name) for name in ("staleness/mean", "staleness/max")]
    if None not in ages:
        yield (f"staleness: at most {forecast.staleness.versions}, mean {forecast.staleness.mean:.2g} predicted; "
               f"at most {ages[1]:.3g}, mean {ages[0]:.2g} measured")
