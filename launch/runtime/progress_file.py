"""`progress.json`: the phase a job is in, written by the driver, read by the launcher and `megatron-rl status`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.config.schema import Run
from launch.runtime.attempts import write_atomically

FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where the job is. `at` moves whenever something arrives, also inside a phase."""

    step: int
    """The step that is being made; 0 during start-up."""
    phase: str
    """`start`, `rollout`, `reward`, `log-prob`, `train`, `sync`, `eval`, `save`."""
    detail: str
    at: float
    """Wall-clock time of the last sign of progress."""
    expected_s: float | None = None
    """What this phase has usually taken in this attempt; None when it has not happened yet."""


def write_progress(folder: Path, step: int, phase: str, detail: str = "", expected_s: float | None = None) -> None:
    progress = Progress(step, phase, detail, time.time(), expected_s)
    write_atomically(folder / FILE, json.dumps(asdict(progress)))


def read_progress(folder: Path) -> Progress | None:
    path = folder / FILE
    return Progress(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def allowed_s(progress: Progress, run: Run) -> float:
    """Seconds without progress that this phase may take: `hang_factor` times its usual time, at least `hang_min_s`;
    where nothing is known yet (start-up, the first time of a phase), `deadline_s`."""
    if progress.expected_s is None:
        return max(run.deadline_s, run.hang_min_s)
    return max(run.hang_factor * progress.expected_s, run.hang_min_s)


def overdue(progress: Progress, run: Run, now: float) -> bool:
    """Whether the job hangs, by the rule of `allowed_s`."""
    return now - progress.at > allowed_s(progress, run)
