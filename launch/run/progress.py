"""`progress.json`: the phase a job is in, written by the driver, read by the launcher and `megatron-rl status`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.config.schema import RunConfig
from launch.files.shared import read_shared, write_atomically

FILE = "progress.json"
AFTER_THE_STEP = ("eval", "save", "export", "end")
"""Phases that come when the step itself is done."""


@dataclass(frozen=True)
class Progress:
    """Where the job is. `at` moves whenever something arrives, also inside a phase."""

    step: int
    """The step that is being made; 0 during start-up."""
    phase: str
    """`start`, `rollout`, `reward`, `log-prob`, `disk`, `train`, `sync`, `eval`, `save`, `export`, `end`."""
    detail: str
    at: float
    """Wall-clock time of the last sign of progress."""
    expected_s: float | None = None
    """What this phase has usually taken in this attempt; None when it has not happened yet."""


def write_progress(folder: Path, step: int, phase: str, detail: str = "", expected_s: float | None = None) -> None:
    progress = Progress(step, phase, detail, time.time(), expected_s)
    write_atomically(folder / FILE, json.dumps(asdict(progress)))


def read_progress(folder: Path) -> Progress | None:
    values = read_shared(folder / FILE)
    return None if values is None else Progress(**values)


INSIDE_FIRST = 1.5
"""The job has deadlines of its own, which know better who is missing: the launcher waits this much longer."""


def allowed_s(progress: Progress, config: RunConfig) -> float:
    """Seconds without progress that this phase may take: `run.hang_factor` times its usual time, at least
    `run.hang_min_s`; where nothing is known yet (start-up, the first time of a phase), `run.deadline_s` and a half. A
    sync may in any case take twice its own deadline, `weight_sync.timeout_s`."""
    run = config.run
    limit = (INSIDE_FIRST * run.deadline_s if progress.expected_s is None
             else max(run.hang_factor * progress.expected_s, run.hang_min_s))
    return max(limit, 2 * config.weight_sync.timeout_s) if progress.phase == "sync" else limit


def overdue(progress: Progress, config: RunConfig, now: float) -> bool:
    """Whether the job hangs, by the rule of `allowed_s`."""
    return now - progress.at > allowed_s(progress, config)


def steps_done(progress: Progress | None) -> int:
    """Steps that were finished at this point."""
    if progress is None:
        return 0
    return progress.step if progress.phase in AFTER_THE_STEP else max(0, progress.step - 1)
