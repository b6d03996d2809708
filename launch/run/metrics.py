"""Reads a run's files: the metrics of all attempts as one history, and other JSONL files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.run.find import attempts_of

Row = dict[str, float]
SPLIT: tuple[tuple[str, str], ...] = (
    ("time/rollout", "rollout"), ("time/reward", "reward"), ("time/logprob", "log-prob"), ("time/train", "train"),
    ("time/sync", "sync"), ("time/other", "other"))
"""The parts of a step, in order, with the label of each."""


def attempt_dirs(run_dir: Path) -> list[Path]:
    """`attempts/<n>` of a run, oldest first. Raises UserError if the folder is not a run."""
    found = attempts_of(run_dir)
    if not found:
        raise UserError(f"{run_dir} is not a run: it has no attempts/<n>", where=str(run_dir),
                        fix="give the run's folder, such as runs/tiny")
    return found


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a JSONL file; [] if it does not exist. An incomplete last line, cut off by a crash, is omitted.

    Raises UserError for an invalid line anywhere else."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]  # the text after the last newline is empty or incomplete
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"not JSON: {error.msg}", where=f"{path}:{number}", fix="remove the line") from error
        rows.append(row)
    return rows


def metric_rows(path: Path) -> list[Row]:
    """Rows of one metrics.jsonl. Every value is a float, including `"NaN"` and infinities; `step` is an int."""
    return list(map(metric_row, read_jsonl(path)))


def metric_row(values: Mapping[str, Any]) -> Row:
    return {name: int(value) if name == "step" else float(value) for name, value in values.items()}


def metric_history(attempts: Sequence[Path]) -> list[Row]:
    """One row per step over all attempts, oldest first. Rows that an older attempt wrote after the point from which a
    newer one resumed are dropped."""
    history: list[Row] = []
    for attempt in attempts:
        rows = metric_rows(attempt / "metrics.jsonl")
        if rows:
            history = [row for row in history if row["step"] < rows[0]["step"]] + rows
    return history


def series(history: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of the rows with a finite value of `name`."""
    pairs = [(int(row["step"]), row[name]) for row in history if name in row and math.isfinite(row[name])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values (fewer at the start)."""
    return [sum(values[max(0, i + 1 - window):i + 1]) / (i + 1 - max(0, i + 1 - window)) for i in range(len(values))]


def first_and_last(values: Sequence[float], window: int = 10) -> tuple[float, float, int]:
    """Means of the first and last `n` values, and `n`, which is at most `window` and at most half of the values."""
    n = max(1, min(window, len(values) // 2))
    return sum(values[:n]) / n, sum(values[-n:]) / n, n


class Tail:
    """Follows a text file that another process is writing.

    Args:
        offset: bytes to skip.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def poll(self) -> list[str]:
        """The lines completed since the last call; [] while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        if not newline:
            return []
        self._offset += len(complete) + 1
        return complete.decode("utf-8", errors="replace").split("\n")

