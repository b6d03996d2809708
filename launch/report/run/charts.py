"""Charts of a run as inline SVG, drawn by matplotlib. Loaded only when a report is written: the launcher's light
install has no matplotlib, and then reports that."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from launch.errors import UserError
from launch.run.metrics import SPLIT, Row, series, smoothed

INK = "#010203"
"""Placeholder for the page's text colour. `currentColor` replaces it, so charts follow light and dark pages."""
BLUE, ORANGE, GREEN, RED, PURPLE = "#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7"
SPLIT_COLOURS = {"rollout": "#06b6d4", "reward": "#eab308", "log-prob": "#d946ef", "train": "#22c55e",
                 "sync": "#3b82f6", "other": "#9ca3af"}
STYLE = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9.5, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": INK, "grid.alpha": 0.12, "axes.linewidth": 0.6,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False,
    "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titleweight": "bold",
}
SMOOTHING = 10
Drawing = Callable[[Any, Sequence[Row]], bool]
"""Draws a history on an Axes; False if the history has no data for it."""


def svg_charts(history: Sequence[Row]) -> dict[str, str]:
    """Chart name -> `<svg>` element; charts without data are absent.

    Raises UserError if matplotlib is not installed."""
    charts: dict[str, Drawing] = {
        "reward": draw_reward, "lengths": draw_lengths, "split": draw_split, "mismatch": draw_mismatch, "kl": draw_kl,
        "entropy": draw_entropy, "grad_norm": draw_grad_norm, "throughput": draw_throughput}
    drawn = {name: _svg(name, draw, history) for name, draw in charts.items()}
    return {name: svg for name, svg in drawn.items() if svg}


def draw_reward(axes, history: Sequence[Row]) -> bool:
    if not _curve(axes, history, "reward/mean", BLUE, "batch mean", smooth=True):
        return False
    steps, accuracy = series(history, "eval/accuracy")
    if steps:
        axes.plot(steps, accuracy, "o-", color=ORANGE, markersize=4, linewidth=1, label="held-out accuracy")
    axes.set_title("Reward")
    axes.legend(loc="lower right")
    return True


def draw_lengths(axes, history: Sequence[Row]) -> bool:
    if not _curve(axes, history, "response/length_mean", BLUE, "mean"):
        return False
    _curve(axes, history, "response/length_max", BLUE, "longest", alpha=0.35)
    axes.set_title("Completion length (tokens) and share cut at the limit")
    steps, cut = series(history, "response/truncated")
    if steps:
        share = axes.twinx()
        share.fill_between(steps, cut, color=RED, alpha=0.25, linewidth=0, label="cut at the limit")
        share.set_ylim(0, 1.25)
        share.grid(False)
        share.legend(loc="upper right")
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legends
    axes.legend(loc="upper left")
    return True


def draw_mismatch(axes, history: Sequence[Row]) -> bool:
    """On a logarithmic axis: fp32 is near 1e-7, bf16 near 1e-3, and a sync that does not arrive near 1."""
    drawn = [_curve(axes, history, name, colour, label, positive=True) for name, colour, label in (
        ("mismatch/abs_max", RED, "largest |difference| of a token"),
        ("mismatch/abs_mean", ORANGE, "mean |difference|"), ("mismatch/kl", BLUE, "KL(engine || trainer)"))]
    if not any(drawn):
        return False
    axes.set_yscale("log")
    axes.set_title("Log-probs: engine against trainer (nats)")
    axes.legend(loc="best")
    return True


def draw_kl(axes, history: Sequence[Row]) -> bool:
    axes.set_title("KL to the reference (nats)")
    return _curve(axes, history, "train/kl", PURPLE, "", smooth=True)


def draw_entropy(axes, history: Sequence[Row]) -> bool:
    if not _curve(axes, history, "train/entropy", GREEN, "entropy (nats)"):
        return False
    _curve(axes, history, "group/zero_variance", ORANGE, "groups with equal rewards (share)")
    axes.set_ylim(bottom=0)
    axes.set_title("Entropy, and groups whose rewards are all equal")
    axes.legend(loc="best")
    return True


def draw_grad_norm(axes, history: Sequence[Row]) -> bool:
    axes.set_title("Gradient norm before clipping")
    return _curve(axes, history, "train/grad_norm", PURPLE, "", smooth=True)


def draw_throughput(axes, history: Sequence[Row]) -> bool:
    axes.set_title("Trained tokens per second")
    drawn = _curve(axes, history, "throughput/tokens_per_s", GREEN, "", smooth=True)
    axes.set_ylim(bottom=0)
    return drawn


def draw_split(axes, history: Sequence[Row]) -> bool:
    """Seconds of each step, stacked in the order in which the parts happen."""
    rows = [row for row in history if "time/step" in row]
    parts = [(word, [max(0.0, row.get(name, 0.0)) for row in rows]) for name, word in SPLIT]
    total = sum(row["time/step"] for row in rows)
    parts = [(word, seconds) for word, seconds in parts if sum(seconds) >= 1e-3 * total and total > 0]
    if not parts:
        return False
    steps = [row["step"] for row in rows]
    axes.stackplot(steps, [seconds for _, seconds in parts], labels=[word for word, _ in parts], linewidth=0,
                   colors=[SPLIT_COLOURS[word] for word, _ in parts], alpha=0.85, step="mid")
    axes.set_title("Step timeline (seconds)")
    axes.set_ylim(0, 1.25 * _quantile([row["time/step"] for row in rows], 0.98))
    axes.legend(loc="upper center", ncols=len(parts))
    return True


def _curve(axes, history: Sequence[Row], name: str, colour: str, label: str, *, smooth: bool = False,
           positive: bool = False, alpha: float = 1.0) -> bool:
    """Draw one metric over steps. With `smooth`, the values are faint and their running mean has the label."""
    steps, values = series(history, name)
    pairs = [(step, value) for step, value in zip(steps, values, strict=True) if not positive or value > 0]
    if not pairs:
        return False
    steps, values = [step for step, _ in pairs], [value for _, value in pairs]
    if smooth and len(values) > SMOOTHING:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        values = smoothed(values, SMOOTHING)
        label = f"{label} (mean of {SMOOTHING})".strip() if label else ""
    axes.plot(steps, values, color=colour, alpha=alpha, linewidth=1.6, label=label or None,
              marker="o" if len(values) == 1 else None)
    return True


def _svg(name: str, draw: Drawing, history: Sequence[Row]) -> str | None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise UserError("the HTML report needs matplotlib, which is not installed",
                        fix="pip install matplotlib") from error
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(9.6, 3.2) if name == "split" else (5.6, 3.0), layout="constrained")
        axes = figure.subplots()
        if not draw(axes, history):
            return None
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.01)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _inline(buffer.getvalue(), name)


def _inline(document: str, name: str) -> str:
    """The bare `<svg>` element: scalable, in the page's colours, with ids that are unique on the page."""
    svg = document[document.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    return svg.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{name}"', 1).strip()


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
