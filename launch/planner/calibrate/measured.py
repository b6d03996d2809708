"""Predicted and measured times of a run, side by side. Every number is labelled as one or the other.

    rollout    predicted: generation, and host work per response             measured: time/rollout + _hidden + reward
    log-prob   predicted: the passes for old and for reference log-probs     measured: time/logprob
    train      predicted: all optimizer steps                                measured: time/train
    sync       predicted: the weight sync                                    measured: time/sync
    step       predicted: the whole step                                     measured: time/step
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


KINDS = (Kind("rollout", ("rollout", "reward"), ("time/rollout", "time/rollout_hidden", "time/reward")),
         Kind("log-prob", ("logprob", "reference"), ("time/logprob",)),
         Kind("train", ("train",), ("time/train",)),
         Kind("sync", ("sync",), ("time/sync",)))


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
    ratio: float
    """Measured over predicted."""
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
    phases = [found for kind in KINDS if (found := _phase(kind, forecast, measured))]
    step = PredictedSeconds(seconds=forecast.step_s, low=forecast.step_low_s, high=forecast.step_high_s)
    phases.append(_comparison("step", step, seconds(measured, ("time/step",)), ("time/step",)))
    lengths = _lengths(forecast, measured)
    steps = Steps(first=int(measured[0]["step"]), last=int(measured[-1]["step"]), count=len(measured),
                  left_out=WARM_UP)
    return PlanVsMeasured(steps=steps, phases=tuple(phases), lengths=lengths,
                          notes=tuple(_notes(phases, lengths)))


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


def _comparison(name: str, predicted: PredictedSeconds, times: Sequence[float],
                metrics: tuple[str, ...]) -> PhaseComparison:
    middle = median(times)
    return PhaseComparison(
        name=name, predicted=predicted, ratio=middle / predicted.seconds,
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


def _notes(phases: Sequence[PhaseComparison], lengths: Sequence[Length]) -> Iterable[str]:
    keys = {"response": "workload.response.mean", "prompt": "workload.prompt_tokens"}
    explains = {"response": "rollout and training", "prompt": "prefill and training"}
    wrong = [each for each in lengths if each.name in keys and abs(each.ratio - 1) > LENGTH_TOLERANCE]
    for each in wrong:
        yield (f"{each.name}s were {each.measured:.4g} tokens long, {each.assumed:.4g} were assumed: "
               f"{explains[each.name]} were predicted for other lengths; "
               f"{keys[each.name]}={each.measured:.4g} predicts this run")
    far = [phase.name for phase in phases if not phase.in_range and phase.name != "step"]
    if far and not wrong:
        yield (f"{', '.join(far)} outside the predicted range, with lengths as assumed: "
               "`megatron-rl plan calibrate` fits the site's coefficients to this run")
