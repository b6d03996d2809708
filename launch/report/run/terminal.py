"""The end of a run on a terminal: the reward curve and the places of all files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.report.lines import plotted
from launch.report.run.display import duration, shares
from launch.run.metrics import Row, first_and_last, series, smoothed


def reward_curve(history: Sequence[Row], *, width: int = 72, height: int = 14) -> str:
    """The mean reward of each batch (dots) and its running mean (line) over steps; "" for fewer than 2 steps."""
    steps, rewards = series(history, "reward/mean")
    if len(steps) < 2:
        return ""

    def draw(figure: Any) -> None:
        figure.draw(figure.signal(steps, rewards, marker="·"))
        figure.draw(figure.signal(steps, smoothed(rewards, 10), marker="braille").lines())
        figure.title(f"reward/mean: {len(steps)} steps (dots) and the mean over the last 10 (line)")
        if 0 <= min(rewards) and max(rewards) <= 1:
            figure.ruler("y").lim(0, 1)
        ticks = sorted({round(steps[0] + i * (steps[-1] - steps[0]) / 5) for i in range(6)})
        figure.ruler("x").ticks(ticks, [str(step) for step in ticks])

    return plotted(width, height, draw)


def mean_split(history: Sequence[Row]) -> Row:
    """Mean seconds of each part of a step, without the first two steps (warm-up) if there are enough."""
    rows = [row for row in history if "time/step" in row]
    rows = rows[2:] if len(rows) > 4 else rows
    names = {name for row in rows for name in row if name.startswith("time/")}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in sorted(names)}


def closing_summary(run_dir: Path, history: Sequence[Row], report: Path | None = None) -> str:
    """The last output of a run: curve, first and last reward, split of the step, paths, the TensorBoard command."""
    lines = [reward_curve(history), ""]
    _, rewards = series(history, "reward/mean")
    if rewards:
        first, last, n = first_and_last(rewards)
        lines.append(f"reward       {first:.3f} -> {last:.3f} "
                     f"(mean of the first {n} and the last {n} of {len(rewards)} steps)")
    _, accuracy = series(history, "eval/accuracy")
    if accuracy:
        ends = [accuracy[0], accuracy[-1]] if len(accuracy) > 1 else accuracy
        lines.append(f"held-out     {' -> '.join(f'{each:.1%}' for each in ends)}")
    split = mean_split(history)
    if split.get("time/step"):
        parts = ", ".join(f"{word} {share:.0%}" for word, _, share in shares(split))
        lines.append(f"step         {split['time/step']:.2f} s: {parts}")
        seconds = sum(row.get("time/step", 0.0) for row in history)
        lines.append(f"training     {duration(seconds)} in {len(rewards)} steps")
    lines.append(f"run          {run_dir}")
    if report:
        lines.append(f"report       {report}")
    if (run_dir / "tensorboard").is_dir():
        lines.append(f"TensorBoard  tensorboard --logdir {run_dir / 'tensorboard'}")
    return "\n".join(lines).lstrip("\n")
