"""`progress.json`: what a job is doing, written by the driver, read by the launcher and `megatron-rl status`."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.config.resolved import ResolvedConfig
from launch.files.shared import read_shared, write_atomically

FILE = "progress.json"
AFTER_THE_STEP = ("eval", "save", "export", "end")
"""What comes when the step itself is done."""


@dataclass(frozen=True)
class Span:
    """Something that the job is doing. Several spans may be open at a time; `at` moves with every sign of life in one.
    """

    name: str
    """`start`, `rollout`, `reward`, `log-prob`, `disk`, `train`, `sync`, `eval`, `save`, `export`, `end`; `step` is
    whatever the driver does between the others."""
    detail: str
    began: float
    """Wall-clock time."""
    at: float
    """Wall-clock time of the last sign of life."""
    expected_s: float | None = None
    """What it has usually taken in this attempt; None when it has not happened yet."""


@dataclass(frozen=True)
class Progress:
    """Where the job is."""

    step: int
    """The step that is being made; 0 during start-up."""
    done: int
    """Steps that are finished."""
    open: tuple[Span, ...]
    """At least one, in the order in which they began."""

    @staticmethod
    def doing(step: int, name: str, detail: str = "", expected_s: float | None = None,
              at: float | None = None) -> Progress:
        """Of a job that does one thing at a time, begun now (or at `at`)."""
        at = time.time() if at is None else at
        done = step if name in AFTER_THE_STEP else max(0, step - 1)
        return Progress(step, done, (Span(name, detail, at, at, expected_s),))

    @property
    def newest(self) -> Span:
        """What was begun last."""
        return self.open[-1]

    @property
    def at(self) -> float:
        """Wall-clock time of the last sign of life of any span."""
        return max(span.at for span in self.open)

    def is_in(self, *names: str) -> bool:
        """Whether a span of one of these names is open."""
        return any(span.name in names for span in self.open)


def write_progress(folder: Path, progress: Progress) -> None:
    write_atomically(folder / FILE, json.dumps(asdict(progress)))


def read_progress(folder: Path) -> Progress | None:
    values = read_shared(folder / FILE)
    if values is None:
        return None
    return Progress(values["step"], values["done"], tuple(Span(**span) for span in values["open"]))


INSIDE_FIRST = 1.5
"""The job has deadlines of its own, which know better who is missing: the launcher waits this much longer."""


def allowed_s(span: Span, config: ResolvedConfig) -> float:
    """Seconds without a sign of life that a span may take: `run.hang_factor` times its usual time, at least
    `run.hang_min_s`; where nothing is known yet (start-up, the first of its name), `run.deadline_s` and a half. A sync
    may in any case take twice its own deadline, `weight_sync.timeout_s`. The end of a job is not judged: its own
    deadlines bound it."""
    if span.name == "end":
        return math.inf
    run = config.run
    limit = (INSIDE_FIRST * run.deadline_s if span.expected_s is None
             else max(run.hang_factor * span.expected_s, run.hang_min_s))
    return max(limit, 2 * config.weight_sync.timeout_s) if span.name == "sync" else limit


def overdue(progress: Progress, config: ResolvedConfig, now: float) -> list[Span]:
    """The open spans that hang, each by the rule of `allowed_s`."""
    return [span for span in progress.open if now - span.at > allowed_s(span, config)]


def steps_done(progress: Progress | None) -> int:
    """Steps that were finished at this point."""
    return 0 if progress is None else progress.done
