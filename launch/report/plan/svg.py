"""Pictures of a forecast: memory of a GPU, the step, and the Pareto front of the alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from launch.plan.forecast import Forecast, MemoryOf, Phase
from launch.report import svg
from launch.report.plan.overview import worst
from launch.report.plan.timeline import phases
from launch.report.quantities import gigabytes, human, seconds
from launch.report.run.charts import SPLIT_COLOURS

WIDE, HALF = 1120.0, 560.0
PHASE_COLOURS = {"rollout": SPLIT_COLOURS["rollout"], "reward": SPLIT_COLOURS["reward"],
                 "logprob": SPLIT_COLOURS["log-prob"], "reference": "#a855f7", "teacher": "#7e22ce",
                 "train": SPLIT_COLOURS["train"], "sync": SPLIT_COLOURS["sync"]}
VERDICT_COLOURS = {"fits": "#16a34a", "tight": "#d97706", "no": "#dc2626"}
STEPS = 2
MOST_BARS = 16


def memory(rows: Sequence[MemoryOf]) -> str:
    """One bar per kind of GPU, split into components, against its limit. With many stages: both ends and the worst."""
    rows = _few(rows)
    names = list(dict.fromkeys(name for row in rows for name in row.components))
    colours = {name: svg.PALETTE[index % len(svg.PALETTE)] for index, name in enumerate(names)}
    left, right, bar, pitch = 76.0, 118.0, 22.0, 34.0
    scale = (HALF - left - right) / (max([1, *(max(row.total, row.limit) for row in rows)]))
    shapes, top = svg.legend(0, 2, [(colours[name], name) for name in names], width=HALF)
    top += 10
    for index, row in enumerate(rows):
        y, x = top + index * pitch, left
        shapes.append(svg.text(0, y + 15, svg.shortened(row.name, left - 6), title=f"{row.role} {row.name}"))
        for name, size in row.components.items():
            words = f"{row.name}: {name} {human(size, 'bytes')}"
            shapes.append(svg.rect(x, y, size * scale, bar, colours[name], title=words))
            x += size * scale
        end = left + row.limit * scale
        shapes += [
            svg.line(end, y - 4, end, y + bar + 4, svg.INK, width=1.6, title=f"limit {human(row.limit, 'bytes')}"),
            svg.text(HALF - right + 10, y + 11, f"{gigabytes(row.total)} of {gigabytes(row.limit)} GB", size=11),
            svg.text(HALF - right + 10, y + 23, row.verdict, size=11, fill=VERDICT_COLOURS[row.verdict], bold=True),
        ]
    return svg.picture(HALF, top + len(rows) * pitch + 6, shapes, "memory of a GPU by component")


def _few(rows: Sequence[MemoryOf]) -> list[MemoryOf]:
    if len(rows) <= MOST_BARS:
        return list(rows)
    kept = []
    for role in ("training", "rollout"):
        members = [row for row in rows if row.role == role]
        heaviest = worst(members)
        kept += [row for index, row in enumerate(members) if index in (0, len(members) - 1) or row is heaviest]
    return kept


def step(forecast: Forecast) -> str:
    """Two steps of the steady state as a Gantt chart with one lane per partition. Light areas are idle time."""
    spans = phases(forecast, STEPS)
    by_name: dict[str, Phase] = {each.name: each for each in forecast.phases}
    left, bar, pitch = 130.0, 30.0, 36.0
    total = max([STEPS * forecast.step_s, 1e-9, *(each.start + each.seconds for each in spans)])
    scale = (WIDE - left - 8) / total
    entries = [(PHASE_COLOURS[each.name], _described(each)) for each in forecast.phases]
    shapes, top = svg.legend(0, 2, entries, width=WIDE)
    top += 12
    first = top
    shared = forecast.split.mode != "disaggregated"
    for partition in ("training",) if shared else ("training", "rollout"):
        members = [each for each in spans if each.partition == partition]
        rows = max((each.row for each in members), default=0) + 1
        nodes = forecast.split.training if partition == "training" else forecast.split.rollout
        shapes += [svg.text(0, top + 14, "training, rollout" if shared else partition, bold=True),
                   svg.text(0, top + 28, f"{nodes} node{'' if nodes == 1 else 's'}", size=11, fill=svg.SOFT)]
        for row in range(rows):
            shapes.append(svg.rect(left, top + row * pitch, total * scale, bar, svg.LINE, opacity=0.5, radius=4))
        for each in members:
            shapes += _phase(each, by_name[each.name], left + each.start * scale, top + each.row * pitch, scale, bar)
        top += rows * pitch + 8
    for index in range(1, STEPS):
        x = left + index * forecast.step_s * scale
        shapes.append(svg.line(x, first - 6, x, top - 4, svg.INK, dash="4 3", title=f"step {index + 1} begins"))
    for tick in svg.ticks(total, 10):
        x = left + tick * scale
        shapes += [svg.line(x, top - 4, x, top + 1, svg.SOFT),
                   svg.text(x, top + 14, seconds(tick) if tick else "0 s", size=11, anchor="middle", fill=svg.SOFT)]
    return svg.picture(WIDE, top + 22, shapes, "phases of the step over time")


def _phase(span, phase: Phase, x: float, y: float, scale: float, bar: float) -> list[str]:
    width = max(1.5, span.seconds * scale)
    shapes = [svg.rect(x, y, width, bar, PHASE_COLOURS[span.name], radius=min(4, width / 3),
                       opacity=1 if span.step == 0 else 0.45, title=f"step {span.step + 1}: {_described(phase)}")]
    words = f"{span.name} {seconds(span.seconds)}"
    if svg.text_width(words) + 14 < width:
        shapes.append(svg.text(x + 8, y + 14, words, fill="#111827" if span.step == 0 else svg.INK))
        if span.step == 0:                                   # whisker: the uncertainty of the prediction
            low, high, end = x + phase.low * scale, x + phase.high * scale, x + width
            for left, right, ink in ((low, min(high, end), "#111827"), (max(low, end), high, svg.INK)):
                if left < right:                             # dark on the bar, the page's ink beyond it
                    shapes.append(svg.line(left, y + 23, right, y + 23, ink, width=1.2, title=_described(phase)))
            shapes += [svg.line(at, y + 20, at, y + 26, "#111827" if at <= end else svg.INK, width=1.2)
                       for at in (low, high)]
    return shapes


def _described(phase: Phase) -> str:
    return f"{phase.name} {seconds(phase.seconds)} ({seconds(phase.low)} to {seconds(phase.high)})"


def pareto(forecast: Forecast) -> str:
    """Prompts per hour over nodes: the front, the chosen plan with its uncertainty, the target."""
    rate, split = forecast.throughput, forecast.split
    used = split.training + split.rollout
    points = sorted(forecast.pareto, key=lambda each: (each.nodes, each.prompts_per_hour))
    left, right, top, height = 62.0, 14.0, 30.0, 210.0
    most = 1.08 * max([rate.high, rate.target or 0, 1e-9, *(each.prompts_per_hour for each in points)])
    widest = max([used, 1, *(each.nodes for each in points)]) * 1.06

    def at(nodes: float, value: float) -> tuple[float, float]:
        return left + nodes / widest * (HALF - left - right), top + height * (1 - min(value, most) / most)

    shapes = [svg.text(0, 13, "prompts/h over nodes", fill=svg.SOFT, size=11)]
    for tick in svg.ticks(most):
        y = at(0, tick)[1]
        label = f"{tick:,.4g}" if tick < 1 else f"{tick:,.0f}"
        shapes += [svg.line(left, y, HALF - right, y),
                   svg.text(left - 8, y + 4, label, size=11, anchor="end", fill=svg.SOFT)]
    for tick in svg.ticks(widest, 8):
        if tick == int(tick):
            shapes.append(svg.text(at(tick, 0)[0], top + height + 17, f"{tick:.0f}", size=11, anchor="middle",
                                   fill=svg.SOFT))
    if rate.target is not None:
        y = at(0, rate.target)[1]
        shapes += [svg.line(left, y, HALF - right, y, "#ef4444", dash="6 4", width=1.4),
                   svg.text(left + 6, y - 5, f"target {human(rate.target)}", size=11, fill="#ef4444")]
    if points:
        commands: list[str | float] = []
        for index, each in enumerate(points):         # a staircase: there is nothing between two plans
            x, y = at(each.nodes, each.prompts_per_hour)
            commands += ["M", x, y] if index == 0 else ["H", x, "V", y]
        shapes.append(svg.path(commands, svg.PALETTE[0], opacity=0.6))
    for each in points:
        words = (f"{each.nodes} nodes, {each.training} + {each.rollout}: {each.prompts_per_hour:,.0f} prompts/h, "
                 f"{each.layout}")
        x, y = at(each.nodes, each.prompts_per_hour)
        shapes.append(svg.circle(x, y, 4, svg.PALETTE[0], title=words, kind="pareto"))
    x, y = at(used, rate.nominal)
    chosen = f"chosen: {used} nodes, {rate.nominal:,.0f} prompts/h ({rate.low:,.0f} to {rate.high:,.0f})"
    for value in (rate.low, rate.high):
        shapes.append(svg.line(x - 5, at(0, value)[1], x + 5, at(0, value)[1], svg.PALETTE[1], width=1.6))
    shapes += [svg.line(x, at(0, rate.low)[1], x, at(0, rate.high)[1], svg.PALETTE[1], width=1.6, title=chosen),
               svg.circle(x, y, 6, svg.PALETTE[1], title=chosen, stroke="var(--card)", width=1.5)]
    shift, anchor = (12, "start") if x < HALF * 0.6 else (-12, "end")
    shapes.append(svg.text(x + shift, y + 20, f"chosen: {rate.nominal:,.0f}", size=11, bold=True, anchor=anchor,
                           halo=True))
    return svg.picture(HALF, top + height + 28, shapes, "prompts per hour over nodes")
