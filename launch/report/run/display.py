"""Live progress of a run: a panel on a terminal, one plain line per step elsewhere, nothing with `--quiet`.

It receives the rows of metrics.jsonl, from the loop itself or from a process that follows the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.run.metrics import SPLIT

COLOURS = {"rollout": "cyan", "reward": "yellow", "log-prob": "magenta", "train": "green", "sync": "blue",
           "other": "bright_black"}
RECENT = 20
"""Number of recent steps that the remaining time and the sparkline use."""
SPARKS = "▁▂▃▄▅▆▇█"


class Display:
    """Shows nothing (`--quiet`). The other displays override what they show. Use it as a context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        pass

    def phase(self, text: str) -> None:
        """Show the current phase, such as `starting 1 vLLM engine`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a completed step."""

    def message(self, text: str) -> None:
        """Show a line that stays, such as a warning."""


def make_display(name: str, steps: int, *, console: Console | None = None, quiet: bool = False) -> Display:
    """The display that suits standard output."""
    if quiet:
        return Display()
    console = console or Console()
    return LiveDisplay(name, steps, console) if console.is_terminal else LineDisplay(steps, console)


class LineDisplay(Display):
    """One line per step, suitable for a log file."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console
        self._pace = Pace(steps)

    def phase(self, text: str) -> None:
        self._print(text)

    def message(self, text: str) -> None:
        self._print(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pace.add(step, metrics)
        parts = [f"step {step}/{self._steps}"]
        if "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.3f}")
        if "throughput/tokens_per_s" in metrics:
            parts.append(f"{metrics['throughput/tokens_per_s']:.0f} tokens/s")
        if shares(metrics):
            parts.append(split_text(metrics))
        if "eval/accuracy" in metrics:
            parts.append(f"accuracy {metrics['eval/accuracy']:.1%}")
        self._print("  ".join([*parts, f"left {self._pace.left()}"]))

    def _print(self, text: str) -> None:
        # soft_wrap: a log line stays one line, whatever width rich assumes.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(Display):
    """A panel that is redrawn in place."""

    def __init__(self, name: str, steps: int, console: Console) -> None:
        self._name, self._steps, self._console = name, steps, console
        self._pace = Pace(steps)
        self._rewards: deque[float] = deque(maxlen=60)
        self._phase, self._step = "starting", 0
        self._metrics: Mapping[str, float] = {}
        self._accuracy: float | None = None
        self._live = Live(self._render(), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception) -> None:
        self._live.update(self._render(), refresh=True)
        self._live.stop()

    def phase(self, text: str) -> None:
        self._phase = text
        self._live.update(self._render())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics = step, metrics
        self._pace.add(step, metrics)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._accuracy = metrics.get("eval/accuracy", self._accuracy)
        self._live.update(self._render())

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def _render(self) -> Panel:
        title = f"{self._name}   step {self._step}/{self._steps}"
        bar = ProgressBar(total=self._steps, completed=self._step)
        body: list[RenderableType] = [_row(bar, Text(f"left {self._pace.left()}", justify="right"))]
        if self._metrics:
            body += [self._numbers(), split_bar(self._metrics), split_legend(self._metrics)]
        return Panel(Group(*body), title=Text(title), title_align="left", subtitle=Text(self._phase),
                     subtitle_align="left", width=min(self._console.width, 100))

    def _numbers(self) -> Text:
        m = self._metrics
        text = Text()
        if "reward/mean" in m:
            text.append(f"reward {m['reward/mean']:.3f} ", style="bold")
            text.append(sparkline(self._rewards) + "   ", style="green")
        if "throughput/tokens_per_s" in m:
            text.append(f"{m['throughput/tokens_per_s']:.0f} tokens/s   ")
        if "response/length_mean" in m:
            text.append(f"length {m['response/length_mean']:.1f}   ")
        if self._accuracy is not None:
            text.append(f"held-out {self._accuracy:.1%}")
        return text


class Pace:
    """Remaining time, from the median of the last steps: one slow step (compilation, checkpoint) does not move it."""

    def __init__(self, steps: int) -> None:
        self._steps, self._step = steps, 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        if "time/step" in metrics:
            self._recent.append(metrics["time/step"])

    def left(self) -> str:
        if not self._recent:
            return "–"
        return duration(sorted(self._recent)[len(self._recent) // 2] * max(0, self._steps - self._step))


def duration(seconds: float) -> str:
    """`0:07`, `12:40`, `3:05:00`."""
    minutes, rest = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shares(metrics: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(word, seconds, share of the step) of each part that takes at least a thousandth of the step."""
    parts = [(word, max(0.0, metrics.get(name, 0.0))) for name, word in SPLIT]
    total = metrics.get("time/step") or sum(seconds for _, seconds in parts)
    if total <= 0:
        return []
    return [(word, seconds, seconds / total) for word, seconds in parts if seconds >= 1e-3 * total]


def split_text(metrics: Mapping[str, float]) -> str:
    """`1.62 s: rollout 0.40, train 0.90, sync 0.20` for a log line."""
    parts = shares(metrics)
    total = metrics.get("time/step") or sum(seconds for _, seconds, _ in parts)
    return f"{total:.2f} s: " + ", ".join(f"{word} {seconds:.2f}" for word, seconds, _ in parts)


def split_bar(metrics: Mapping[str, float], width: int = 60) -> Text:
    """The step as one bar of `width` cells. Cumulative ends are rounded, so the parts always fill the bar."""
    text, drawn, end = Text(), 0, 0.0
    parts = shares(metrics)
    total = sum(share for _, _, share in parts) or 1.0
    for word, _, share in parts:
        end += share / total
        cells = round(end * width) - drawn
        text.append("█" * cells, style=COLOURS[word])
        drawn += cells
    return text


def split_legend(metrics: Mapping[str, float]) -> Text:
    text = Text(f"{metrics['time/step']:.2f} s   " if "time/step" in metrics else "")
    for word, _, share in shares(metrics):
        text.append("■ ", style=COLOURS[word])
        text.append(f"{word} {share:.0%}   ")
    return text


def sparkline(values) -> str:
    """Unicode blocks from the smallest to the largest value."""
    values = list(values)
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[int((value - low) * scale)] for value in values[-RECENT:])


def _row(left, right) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", width=14)
    grid.add_row(left, right)
    return grid
