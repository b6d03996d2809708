"""Predictions for a set of points and their quality: per regime, per kind, and with each source left out."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.accuracy.fit import median
from launch.accuracy.interface import KINDS, VERDICTS, KindModule, Predicted
from launch.accuracy.points import Point, load
from launch.coefficients.base import Coefficients
from launch.errors import UserError
from launch.processes import over_cores

DEVELOPMENT = Path(__file__).resolve().parents[2] / "benchmarks" / "measured"
"""The points that the shipped coefficients are calibrated on."""

MINIMUM = 8
"""Number of points from which a regime has a target."""


@dataclass(frozen=True, slots=True)
class Target:
    """Upper limits of the medians of a group's absolute and signed errors."""

    absolute: float
    signed: float | None = None


TARGETS: dict[str, Target] = {"parameters": Target(0.0), "memory": Target(0.08), "training": Target(0.08),
                              "decode": Target(0.10, 0.04), "rl_steps": Target(0.25)}
RL_TOTAL = Target(0.20)
FEWEST = 3
"""Number of points of a phase below which there is no target."""
RL_TOTALS = ("step_time_s", "tokens_per_s_per_gpu")
"""Quantities of an RL step that describe the whole step. The others are phases."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity of one point."""

    point: Point
    result: Predicted

    @property
    def scored(self) -> bool:
        """Whether it has an error that enters a median."""
        return self.result.error is not None and self.result.quantity not in VERDICTS


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of a group of rows."""

    label: str
    points: int
    quantities: int
    absolute: float
    """Median of |error|."""
    signed: float
    """Median of the signed error. Above 0, the model predicts too much."""
    target: Target | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.absolute <= self.target.absolute and (
            self.target.signed is None or abs(self.signed) <= self.target.signed)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A source that was left out of the calibration."""

    kind: str
    source: str
    part: str
    """Class of its points (`KindModule`); empty if all points of the kind share coefficients."""
    inside: Score
    """Errors at this source's points with the shipped coefficients."""
    outside: Score | None
    """Errors at the same points, with coefficients fitted to the other sources from neutral values
    (`KindModule.TYPICAL`). None if there is nothing to fit, see `reason`."""
    reason: str = ""


def module(kind: str) -> KindModule:
    """The model of a kind, imported on demand."""
    return importlib.import_module(f"launch.accuracy.{kind}")


def development_points() -> list[Point] | None:
    """The points of the repository; None in an installation without them."""
    return load(DEVELOPMENT) if DEVELOPMENT.is_dir() else None


def predict(points: Iterable[Point], find: Callable[[str], KindModule] = module,
            coefficients: Mapping[str, Coefficients] | None = None) -> list[Row]:
    """Predictions for all points, grouped by kind in the order of `KINDS`. A kind without an entry in `coefficients`
    uses the shipped ones."""
    listed = list(points)
    rows: list[Row] = []
    for kind in KINDS:
        mine = [point for point in listed if point.kind == kind]
        if mine:
            model = find(kind)
            used = (coefficients or {}).get(kind) or model.default()
            rows += [row for point in mine for row in _predict(model, point, used)]
    return rows


def _predict(model: KindModule, point: Point, coefficients: Coefficients) -> list[Row]:
    """Predict one point. A point that the model refuses or fails on is an unpredicted point, not the end of the
    table."""
    try:
        results = model.predict(point, coefficients)
    except UserError as error:
        results = [_unpredicted(point, error.what)]
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        results = [_unpredicted(point, f"the model failed: {type(error).__name__}: {error}")]
    results = results or [_unpredicted(point, "no quantity that is predicted")]
    return [Row(point, _finite(result)) for result in results]


def _finite(result: Predicted) -> Predicted:
    if result.predicted is None or result.quantity in VERDICTS or 0 < result.predicted < math.inf:
        return result
    return replace(result, predicted=None, reason=f"the model failed: it says {result.predicted}")


def _unpredicted(point: Point, reason: str) -> Predicted:
    values = point.get("measured")
    for name in values if isinstance(values, Mapping) else ():
        value = point.number(f"measured.{name}")
        if value is not None:
            return Predicted(str(name), value, value, None, reason)
    return Predicted("nothing measured", 0.0, 0.0, None, reason)


def score(label: str, rows: Sequence[Row], target: Target | None = None) -> Score | None:
    """Medians over the rows that have an error; None if there are none."""
    scored = [row for row in rows if row.scored]
    if not scored:
        return None
    errors = [row.result.error for row in scored if row.result.error is not None]
    return Score(label, len({row.point.id for row in scored}), len(scored), median([abs(error) for error in errors]),
                 median(errors), target)


def regime_scores(rows: Sequence[Row]) -> dict[tuple[str, str], Score]:
    """(kind, regime) -> score. A regime has a target if it has at least `MINIMUM` points."""
    scores = {}
    for kind, regime in dict.fromkeys((row.point.kind, row.point.regime) for row in rows):
        members = [row for row in rows if (row.point.kind, row.point.regime) == (kind, regime)]
        points = len({row.point.id for row in members if row.scored})
        found = score(regime, members, TARGETS.get(kind) if points >= MINIMUM else None)
        if found is not None:
            scores[kind, regime] = found
    return scores


def kind_scores(rows: Sequence[Row]) -> dict[str, list[Score]]:
    """Kind -> its scores. Most kinds have one score. An RL step has one per phase and one for the total, separately for
    colocated and disaggregated runs."""
    scores: dict[str, list[Score]] = {}
    for kind in KINDS:
        mine = [row for row in rows if row.point.kind == kind]
        groups = _rl_groups(mine) if kind == "rl_steps" else [("all", mine, TARGETS.get(kind))]
        found = [each for label, members, target in groups if (each := score(label, members, target)) is not None]
        if found:
            scores[kind] = found
    return scores


def _rl_groups(rows: Sequence[Row]) -> list[tuple[str, list[Row], Target | None]]:
    groups: dict[str, tuple[list[Row], Target]] = {}
    for place in ("colocated", "disaggregated"):
        for row in rows:
            if placement_of(row.point) != place:
                continue
            total = row.result.quantity in RL_TOTALS
            label = f"{place}, {'the step' if total else row.result.quantity.removesuffix('_time_s')}"
            groups.setdefault(label, ([], RL_TOTAL if total else TARGETS["rl_steps"]))[0].append(row)
    return [(label, members, target if sum(row.scored for row in members) >= FEWEST else None)
            for label, (members, target) in groups.items()]


def placement_of(point: Point) -> str:
    """Whether an RL run shares its GPUs between the roles over time."""
    return "colocated" if (point.text("mode") or "colocated").startswith("colocated") else "disaggregated"


def leave_one_out(rows: Sequence[Row], development: Sequence[Point],
                  find: Callable[[str], KindModule] = module) -> list[LeftOut]:
    """Fit every kind's coefficients without one source, for each source in turn, and predict the rows of that source.

    Sources of `rows` that were not used to calibrate do not appear: their errors are out-of-sample anyway. If no other
    source constrains a kind, or a class without shared coefficients, there is no error, because it would be the error
    of the neutral values.
    """
    jobs: list[tuple[str, list[Row], list[Point]]] = []
    for kind in KINDS:
        fitted = [point for point in development if point.kind == kind and point.calibrates]
        class_of = getattr(find(kind), "class_of", lambda point: "")
        for source in dict.fromkeys(point.source for point in fitted if kind != "parameters"):
            mine = [row for row in rows if row.point.kind == kind and row.point.source == source and row.scored]
            others = [point for point in fitted if point.source != source]
            for part in dict.fromkeys(class_of(row.point) for row in mine):
                jobs.append((part, [row for row in mine if class_of(row.point) == part],
                             [point for point in others if class_of(point) == part]))
    results = over_cores(partial(_left_out, find), jobs)
    return [result for result in results if result is not None]


def _left_out(find: Callable[[str], KindModule], job: tuple[str, list[Row], list[Point]]) -> LeftOut | None:
    """Rows of one source, predicted with coefficients from the points of the others."""
    part, mine, others = job
    kind, source = mine[0].point.kind, mine[0].point.source
    inside = score(source, mine)
    if inside is None:
        return None
    if not others:
        return LeftOut(kind, source, part, inside, None, f"no other source has points of {part or kind}")
    model = find(kind)
    coefficients = model.calibrate(others, model.default().changed(dict(model.TYPICAL)))
    points = list({row.point.id: row.point for row in mine}.values())
    outside = score(source, predict(points, find, {kind: coefficients}))
    return None if outside is None else LeftOut(kind, source, part, inside, outside)
