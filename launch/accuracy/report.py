"""A complete validation, as data and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch.accuracy.checks import Requirement, run_checks
from launch.accuracy.interface import KINDS, KindModule
from launch.accuracy.points import Point
from launch.accuracy.score import (
    LeftOut,
    Row,
    Score,
    development_points,
    kind_scores,
    leave_one_out,
    module,
    predict,
    regime_scores,
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    rows: list[Row]
    """One row per measured quantity of each point."""
    regimes: dict[tuple[str, str], Score]
    kinds: dict[str, list[Score]]
    checks: list[Requirement]
    left_out: list[LeftOut]
    left_out_note: str
    """Why `left_out` is empty; "" if it is not."""

    @property
    def unpredicted(self) -> list[Row]:
        return [row for row in self.rows if row.result.predicted is None]


def evaluate(points: Sequence[Point], kind: str | None = None, leave_out: bool = True,
             find: Callable[[str], KindModule] = module) -> Report:
    """Run the models over the points.

    Args:
        points: the loaded points.
        kind: only this kind of `interface.KINDS`.
        leave_out: also fit without each source in turn.
        find: returns a kind's model.
    """
    rows = predict([point for point in points if kind is None or point.kind == kind], find)
    left_out, note = _left_out(rows, find) if leave_out else ([], "not asked for (--no-leave-out)")
    return Report(rows, regime_scores(rows), kind_scores(rows), run_checks(rows, find), left_out, note)


def _left_out(rows: Sequence[Row], find: Callable[[str], KindModule]) -> tuple[list[LeftOut], str]:
    development = development_points()
    if development is None:
        return [], "the development points are not installed: run in a checkout of the repository"
    kinds = {row.point.kind for row in rows}
    found = leave_one_out(rows, [point for point in development if point.kind in kinds], find)
    return found, "" if found else "no source of these points took part in a calibration"


def as_json(report: Report) -> dict[str, Any]:
    """The document that `megatron-rl plan accuracy --json` prints. Keys of `regimes` are "kind/regime". A measured
    range is [low, high]."""
    return {
        "schema_version": SCHEMA_VERSION,
        "points": [{**_point(row), "predicted": row.result.predicted, "error": row.result.error}
                   for row in report.rows if row.result.predicted is not None],
        "unpredicted": [{**_point(row), "reason": row.result.reason} for row in report.unpredicted],
        "regimes": {f"{kind}/{regime}": {"kind": kind, "regime": regime, **_score(score)}
                    for (kind, regime), score in report.regimes.items()},
        "kinds": {kind: {score.label: _score(score) for score in report.kinds[kind]}
                  for kind in KINDS if kind in report.kinds},
        "checks": [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in report.checks],
        "leave_one_out": [_source_left_out(each) for each in report.left_out],
    }


def _point(row: Row) -> dict[str, Any]:
    low, high = row.result.measured_low, row.result.measured_high
    return {"id": row.point.id, "kind": row.point.kind, "regime": row.point.regime, "quantity": row.result.quantity,
            "measured": low if low == high else [low, high]}


def _source_left_out(each: LeftOut) -> dict[str, Any]:
    """`class` is set if the classes of a kind are fitted separately. `left_out` is null, with a `reason`, if there is
    nothing left to fit."""
    found: dict[str, Any] = {"kind": each.kind, "source": each.source, "class": each.part or None,
                             "calibrated_on_all": _score(each.inside),
                             "left_out": None if each.outside is None else _score(each.outside)}
    return found | ({"reason": each.reason} if each.reason else {})


def _score(score: Score) -> dict[str, Any]:
    found: dict[str, Any] = {"points": score.points, "quantities": score.quantities,
                             "median_absolute_error": score.absolute, "median_signed_error": score.signed}
    if score.target is not None:
        found |= {"target_absolute": score.target.absolute, "target_signed": score.target.signed, "met": score.met}
    return found
