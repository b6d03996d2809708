"""`progress.json`: the progress of a job. The driver writes it; the launcher and `megatron-rl status` read it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.config.resolved import ResolvedConfig
from launch.files.shared import read_shared, write_atomically

FILE = "progress.json"
AFTER_THE_STEP = ("eval", "save", "export", "end")
"""Spans that follow the step itself."""


@dataclass(frozen=True)
class Span:
    """An activity of the job. Several spans may be open at a time. Every sign of life in a span updates its `at`.
    """

    name: str
    """`start`, `rollout`, `reward`, `log-prob`, `disk`, `train`, `sync`, `eval`, `save`, `export`, `end`; `step` is the
    driver's work between the others."""
    detail: str
    began: float
    """Wall-clock time."""
    at: float
    """Wall-clock time of the last sign of life."""
    expected_s: float | None = None
    """Usual duration in this attempt, in seconds; None if it has not happened yet."""


@dataclass(frozen=True)
class Progress:
    """The progress of the job."""

    step: int
    """The current step; 0 during start-up."""
    done: int
    """Number of completed steps."""
    open: tuple[Span, ...]
    """Open spans, at least one, in the order in which they began."""

    @property
    def newest(self) -> Span:
        """The span that began last."""
        return self.open[-1]

    @property
    def at(self) -> float:
        """Wall-clock time of the last sign of life of any span."""
        return max(span.at for span in self.open)

    def is_in(self, *names: str) -> bool:
        """Whether a span with one of these names is open."""
        return any(span.name in names for span in self.open)


def write_progress(folder: Path, progress: Progress) -> None:
    write_atomically(folder / FILE, json.dumps(asdict(progress)))


def read_progress(folder: Path) -> Progress | None:
    values = read_shared(folder / FILE)
    if values is None:
        return None
    return Progress(values["step"], values["done"], tuple(Span(**span) for span in values["open"]))


INSIDE_FIRST = 1.5
"""The launcher waits this much longer than the job's own deadlines, whose messages name the missing process."""
SILENT_IN_SYNC = 3.0
"""A member that is silent in a sync is left out after 2.5 deadlines: 1.5 for its phase and 1 for leaving the lanes."""


def allowed_s(span: Span, config: ResolvedConfig) -> float:
    """Seconds that a span may take without a sign of life: `run.hang_factor` times its usual duration, at least
    `run.hang_min_s`. If no duration is known (start-up, the first span of its name), 1.5 times `run.deadline_s`. So
    long may also a save take always, because most saves only copy, and others write and remove whole checkpoints. A
    sync may always take three times its own deadline, `weight_sync.timeout_s`. The end of a job has no limit here,
    because its own deadlines bound it."""
    if span.name == "end":
        return math.inf
    run = config.run
    first = INSIDE_FIRST * run.deadline_s
    limit = first if span.expected_s is None else max(run.hang_factor * span.expected_s, run.hang_min_s)
    if span.name == "save":
        return max(limit, first)
    return max(limit, SILENT_IN_SYNC * config.weight_sync.timeout_s) if span.name == "sync" else limit


def overdue(progress: Progress, config: ResolvedConfig, now: float) -> list[Span]:
    """The open spans that exceed `allowed_s`."""
    return [span for span in progress.open if now - span.at > allowed_s(span, config)]


def steps_done(progress: Progress | None) -> int:
    """Number of steps completed at this point."""
    return 0 if progress is None else progress.done
