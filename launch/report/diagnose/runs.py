"""`megatron-rl runs`: all runs of a folder, one line each. Only files are read; Slurm is not asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from launch.errors import UserError
from launch.report.diagnose.status import ENDS, read_status, steps_of
from launch.run.find import Found, attempts_of, job_of, runs_in
from launch.run.outcome import FILE as OUTCOME
from launch.run.outcome import read_outcome
from launch.run.progress import read_progress

SCHEMA_VERSION = 1
By = Literal["when", "name", "state", "step"]
UNREADABLE = "UNREADABLE"
"""State of a run with a broken file."""


@dataclass(frozen=True)
class RunLine:
    """A run, described by its newest attempt."""

    name: str
    state: str
    """As in `Status.state`, or UNREADABLE."""
    step: int
    """Completed steps."""
    steps: int | None
    """The value of `run.steps`."""
    when: float
    """Time of its end or of its last progress, in seconds since 1970."""
    attempts: int
    job: str | None
    """Slurm job of the newest attempt."""
    folder: str


def list_runs(folder: Path, now: float, by: By = "when") -> list[RunLine]:
    """The runs of a folder, sorted by time or step (largest first), or by name or state.

    Raises:
        UserError: the folder does not exist.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", where=str(folder.absolute()),
                        fix="name it with --dir (run.dir)")
    order = {"when": lambda line: (-line.when, line.name), "name": lambda line: line.name,
             "state": lambda line: (line.state, -line.when), "step": lambda line: (-line.step, line.name)}
    return sorted((_line(path, now) for path in runs_in(folder)), key=order[by])


def as_json(lines: Sequence[RunLine]) -> dict:
    return {"schema_version": SCHEMA_VERSION, "runs": list(map(asdict, lines))}


def as_text(lines: Sequence[RunLine], folder: Path) -> str:
    """A table, or a note if there are no runs."""
    if not lines:
        return f"no runs in {folder}"
    rows = [("run", "state", "step", "when", "attempts", "job")]
    rows += [(line.name, line.state, f"{line.step}/{line.steps}" if line.steps else str(line.step),
              time.strftime("%Y-%m-%d %H:%M", time.localtime(line.when)), str(line.attempts), line.job or "-")
             for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)


def _line(folder: Path, now: float) -> RunLine:
    attempts = attempts_of(folder)
    newest = attempts[-1] if attempts else None
    when = (newest or folder).stat().st_mtime
    job, steps = None, None
    try:
        if newest is None:
            return RunLine(folder.name, "QUEUED", 0, None, when, 0, None, str(folder))
        job, steps = job_of(newest), steps_of(newest)
        outcome, progress = read_outcome(newest), read_progress(newest)
        if outcome is not None:
            state, step, when = ENDS[outcome.status], outcome.step, (newest / OUTCOME).stat().st_mtime
        else:
            status = read_status(Found(folder.name, folder, newest, job), now, brief=True)
            state, step, when = status.state, status.step, progress.at if progress else when
    except (UserError, OSError, ValueError, LookupError, TypeError):        # a truncated or edited file
        state, step = UNREADABLE, 0
    return RunLine(folder.name, state, step, steps, when, len(attempts), job, str(folder))
