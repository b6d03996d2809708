"""The capacity curve of `megatron-rl plan sweep nodes=8..64`: prompts per hour over nodes, and their cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.planner.sweep import SweepPoint, smallest_that_reaches
from launch.report.lines import plotted
from launch.report.plan.overview import VERDICT_STYLES, WIDTH, terminal
from launch.report.quantities import plain, significant
from launch.report.svg import ticks


def print_sweep(points: Sequence[SweepPoint], target: float | None, console: Console | None = None, *,
                remarks: Sequence[str] = ()) -> None:
    """One row per cluster size, with the smallest that reaches the target marked, and the curve below.

    Args:
        points: sorted by nodes.
        target: prompts per hour, or None.
        remarks: printed last.
    """
    console = console or terminal()
    smallest = smallest_that_reaches(points, target)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    numbers = ("nodes", "predicted\nprompts/h", "GPU-hours\nper 1,000")
    for title in ("", "nodes", "training + rollout", "predicted\nprompts/h", "GPU-hours\nper 1,000", "verdict"):
        table.add_column(title, justify="right" if title in numbers else "left")
    for point in points:
        mark = ">" if point is smallest else ""
        table.add_row(mark, f"{point.nodes}", Text(plain(point.split)), _number(point.prompts_per_hour, 0),
                      _number(point.gpu_hours, 1), Text(plain(point.verdict), VERDICT_STYLES.get(point.verdict, "")),
                      style="bold" if mark else None)
    console.print(table)
    curve = capacity_curve(points, target, width=min(WIDTH, console.width))
    if curve and console.encoding.lower().startswith("utf"):
        console.print()
        console.print(Text(curve), soft_wrap=True)
    console.print()
    console.print(Text(_answer(points, target, smallest)))
    for remark in remarks:
        console.print(Text(plain(remark)))


def capacity_curve(points: Sequence[SweepPoint], target: float | None, *, width: int = 72) -> str:
    """Prompts per hour over nodes, with the target as a line; "" for fewer than two points."""
    drawn = [(each.nodes, each.prompts_per_hour) for each in points if each.prompts_per_hour is not None]
    if len(drawn) < 2:
        return ""
    nodes, rates = [float(each[0]) for each in drawn], [float(each[1]) for each in drawn]
    most, every = 1.1 * max([*rates, target or 0]), max(1, -(-len(drawn) // 10))

    def draw(figure: Any) -> None:
        if target is not None:
            figure.draw(figure.signal([nodes[0], nodes[-1]], [target, target], marker="-").lines())
        figure.draw(figure.signal(nodes, rates, marker="braille").lines())
        figure.draw(figure.signal(nodes, rates, marker="●"))
        figure.title("prompts/h over nodes, predicted" + ("" if target is None else f"; line: target {target:,.0f}"))
        figure.ruler("y").lim(0, most)
        figure.ruler("y").ticks(ticks(most, 6), [f"{each:,.0f}" for each in ticks(most, 6)])
        figure.ruler("x").ticks(nodes[::every], [f"{each:.0f}" for each in nodes[::every]])

    return plotted(width, 16, draw)


def _answer(points: Sequence[SweepPoint], target: float | None, smallest: SweepPoint | None) -> str:
    rated = [(each.prompts_per_hour, each.nodes) for each in points if each.prompts_per_hour is not None]
    if not rated:
        return "no plan fits on any of these sizes"
    if smallest is not None:
        return (f"smallest cluster that reaches {target:,.0f} prompts/h: {smallest.nodes} nodes "
                f"({smallest.prompts_per_hour:,.0f} prompts/h predicted)")
    rate, nodes = max(rated, key=lambda pair: pair[0])
    most = f"the maximum is {rate:,.0f} prompts/h with {nodes} nodes (predicted)"
    return most if target is None else f"none of these sizes reaches {target:,.0f} prompts/h: {most}"


def _number(value: float | None, decimals: int) -> str:
    if value is None:
        return "-"
    return f"{value:,.{decimals}f}" if abs(value) >= 1 or not value else significant(value)
