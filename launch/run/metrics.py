"""Reads what a run wrote: metrics of all its attempts as one history, warnings, samples, plan and config."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.errors import UserError

Row = dict[str, float]
SPLIT: tuple[tuple[str, str], ...] = (
    ("time/rollout", "rollout"), ("time/reward", "reward"), ("time/logprob", "log-prob"), ("time/train", "train"),
    ("time/sync", "sync"), ("time/other", "other"))
"""The parts of a step, in the order in which they happen, with the word shown for each."""


def attempt_dirs(run_dir: Path) -> list[Path]:
    """`attempts/<n>` of a run, oldest first. Raises UserError when the folder is not a run's."""
    folder = run_dir / "attempts"
    found = [path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()] if folder.is_dir() else []
    if not found:
        raise UserError(f"{run_dir} is not a run: it holds no attempts/<n>", where=str(run_dir),
                        fix="name the run's folder, such as runs/tiny")
    return sorted(found, key=lambda path: int(path.name))


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSONL file, [] if it does not exist. A last line that a crash cut short is left out.

    Raises UserError for a broken line anywhere else."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]  # what follows the last newline is empty or cut short
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"not JSON: {error.msg}", where=f"{path}:{number}", fix="remove the line") from error
        rows.append(row)
    return rows


def metric_rows(path: Path) -> list[Row]:
    """Rows of one metrics.jsonl, every value a float (`"NaN"` and its like included), `step` an int."""
    return [{name: int(value) if name == "step" else float(value) for name, value in row.items()}
            for row in read_jsonl(path)]


def metric_history(attempts: Sequence[Path]) -> list[Row]:
    """One row a step over all attempts, oldest attempt first: where two hold the same step the newer attempt's
    stands, and everything an older attempt wrote past the point of resume is dropped."""
    history: list[Row] = []
    for attempt in attempts:
        rows = metric_rows(attempt / "metrics.jsonl")
        if rows:
            history = [row for row in history if row["step"] < rows[0]["step"]] + rows
    return history


def series(history: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows that hold a finite value of `name`."""
    pairs = [(int(row["step"]), row[name]) for row in history if name in row and math.isfinite(row[name])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window):i + 1]) / (i + 1 - max(0, i + 1 - window)) for i in range(len(values))]


def first_and_last(values: Sequence[float], window: int = 10) -> tuple[float, float, int]:
    """Means of the first and of the last `n` values, and n: `window`, or half of the values where they are few."""
    n = max(1, min(window, len(values) // 2))
    return sum(values[:n]) / n, sum(values[-n:]) / n, n


class JsonlTail:
    """Follows a JSONL file that another process is writing."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def poll(self) -> Iterator[dict]:
        """The objects that were completed since the last call; none while the file does not exist."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete, newline, _ = data.rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        for line in complete.splitlines():
            yield json.loads(line)


class MetricsTail(JsonlTail):
    """Follows a metrics.jsonl."""

    def poll(self) -> Iterator[Row]:
        for row in super().poll():
            yield {name: float(value) for name, value in row.items()}

