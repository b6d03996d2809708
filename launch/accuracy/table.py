"""A validation as tables: on the terminal, at most 100 columns wide, and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch.accuracy.interface import KINDS, VERDICTS
from launch.accuracy.report import Report
from launch.accuracy.score import MINIMUM, LeftOut, Row, Score

WIDTH = 100
LARGE = 0.1
"""Median error above which the page lists a regime."""
_VERDICT = {True: "met", False: "MISSED", None: ""}
_NUMBERS = ("points", "absolute", "signed", "with it", "without it")
_YES_NO = {True: "yes", False: "no"}
_CHECK = {True: "pass", False: "FAIL", None: "-"}


def print_report(report: Report, units: Mapping[str, Mapping[str, str]], console: Console | None = None) -> None:
    """Print everything: points, regimes, kinds, sources left out, checks, and points that could not be predicted.

    Args:
        report: the validation.
        units: kind -> quantity -> unit, the `QUANTITIES` of the kinds' modules.
    """
    console = console or Console(width=WIDTH, highlight=False)
    for kind in KINDS:
        rows = [row for row in report.rows if row.point.kind == kind and row.result.predicted is not None]
        if rows:
            console.print(_points(kind, rows, units[kind]))
    console.print(_table("median errors, by regime", *_regimes(report)))
    console.print(_table("median errors, by kind", *_kinds(report)))
    if report.left_out:
        console.print(_table("calibrated without a source: median absolute error at its points",
                             *_left_out(report.left_out)))
    else:
        console.print(f"no calibration without each source in turn: {report.left_out_note}\n")
    if report.checks:
        console.print(_table("checks", *_checks(report)))
    if report.unpredicted:
        console.print(_table("not predicted", *_unpredicted(report.unpredicted)))
    console.print("Errors are (predicted - measured) / measured. For a published range the error is 0 inside, and "
                  "relative to the nearer end outside.")
    console.print(f"Targets apply per kind and to regimes of {MINIMUM} points or more.")


def markdown(report: Report) -> str:
    """Everything except the single points and the regimes that are predicted well."""
    parts = [("Kinds", _kinds(report)),
             (f"Regimes with a median error above {LARGE:.0%}", _regimes(report, LARGE)), ("Checks", _checks(report)),
             ("Each source left out in turn", _left_out(report.left_out)),
             ("Not predicted", _unpredicted(report.unpredicted))]
    return "\n\n".join(f"## {title}\n\n{_pipes(*table)}" for title, table in parts if table[1]) + "\n"


Cells = Sequence[Sequence[str]]


def _points(kind: str, rows: Sequence[Row], units: Mapping[str, str]) -> Table:
    """All points by regime, in the order of the file."""
    table = Table(box=SIMPLE_HEAD, title=kind, title_justify="left", pad_edge=False)
    table.add_column("point", overflow="fold", min_width=36)
    table.add_column("quantity", overflow="fold", max_width=20)
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for regime in dict.fromkeys(row.point.regime for row in rows):
        table.add_row(f"[bold]{escape(regime)}[/bold]")
        for row in (row for row in rows if row.point.regime == regime):
            table.add_row(escape(row.point.id), escape(row.result.quantity), *_compared(row, units))
    return table


def _compared(row: Row, units: Mapping[str, str]) -> tuple[str, str, str]:
    """(predicted, measured, error)."""
    result = row.result
    if result.quantity in VERDICTS:
        said, was = _YES_NO[bool(result.predicted)], _YES_NO[bool(result.measured_low)]
        return said, was, "right" if said == was else "wrong"
    unit = units.get(result.quantity, "")
    low, high = figure(result.measured_low, unit), figure(result.measured_high, unit)
    return figure(result.predicted, unit), low if low == high else f"{low} to {high}", percent(result.error)


def _regimes(report: Report, above: float = -1.0) -> tuple[Sequence[str], Cells]:
    return ("kind", "regime", "points", "absolute", "signed", "target", ""), [
        (kind, regime, *_figures(score)) for (kind, regime), score in report.regimes.items() if score.absolute > above]


def _kinds(report: Report) -> tuple[Sequence[str], Cells]:
    return ("kind", "what", "points", "absolute", "signed", "target", ""), [
        (kind, score.label, *_figures(score)) for kind, scores in report.kinds.items() for score in scores]


def _figures(score: Score) -> tuple[str, ...]:
    target = "" if score.target is None else f"{score.target.absolute:.0%}"
    if score.target is not None and score.target.signed is not None:
        target += f", signed {score.target.signed:.0%}"
    return (str(score.points), f"{score.absolute:.1%}", percent(score.signed), target, _VERDICT[score.met])


def _left_out(left_out: Sequence[LeftOut]) -> tuple[Sequence[str], Cells]:
    return ("kind", "source", "points", "with it", "without it", "signed"), [
        (each.kind, each.source + (f", {each.part}" if each.part else ""), str(each.inside.points),
         f"{each.inside.absolute:.1%}", *_outside(each)) for each in left_out]


def _outside(each: LeftOut) -> tuple[str, str]:
    if each.outside is None:
        return "no other source", ""
    return f"{each.outside.absolute:.1%}", percent(each.outside.signed)


def _checks(report: Report) -> tuple[Sequence[str], Cells]:
    return ("check", "", "of"), [(check.name, _CHECK[check.passed], check.detail) for check in report.checks]


def _unpredicted(rows: Sequence[Row]) -> tuple[Sequence[str], Cells]:
    points: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        points.setdefault((row.point.kind, row.point.id, row.result.reason), []).append(row.result.quantity)
    return ("kind", "point", "quantities", "reason"), [
        (kind, name, ", ".join(quantities), reason) for (kind, name, reason), quantities in points.items()]


def _table(title: str, names: Sequence[str], cells: Cells) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in _NUMBERS else "left")
    for row in cells:
        table.add_row(*map(escape, row))
    return table


def _pipes(names: Sequence[str], cells: Cells) -> str:
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def percent(error: float | None) -> str:
    """+3.2%."""
    return "" if error is None else f"{error:+.1%}"


def figure(value: float | None, unit: str) -> str:
    """A number with three digits. Seconds and bytes have their unit (14.7 s, 58.8 GB); the names of other quantities
    contain it."""
    if value is None:
        return ""
    if unit in ("", "parameters"):
        return f"{value:,.0f}"
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if unit.startswith("bytes") and abs(value) >= scale:
            return f"{_digits(value / scale)} {prefix}B{unit.removeprefix('bytes')}"
    for prefix, scale in (("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if unit == "s" and abs(value) >= scale:
            return f"{_digits(value / scale)} {prefix}s"
    return _digits(value)


def _digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
