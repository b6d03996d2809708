"""`attempts.jsonl`: one line for each attempt of a run, in the run's folder. The next attempt reads it before anything
else, and adds a line for one that died without a word: Slurm restarts a job whose node failed, and its leader is gone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from launch.run import node_files
from launch.run.attempts import Attempt
from launch.run.find import attempts_of, job_of
from launch.run.outcome import Outcome, Status, read_outcome, write_outcome
from launch.run.progress import read_progress, steps_done
from launch.run.stop import Reason, stop_reason

FILE = "attempts.jsonl"


class PastAttempt(BaseModel):
    """A line."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    attempt: int
    job_id: str
    status: Status
    step_before: int
    """Most steps that any earlier attempt had completed."""
    step: int
    """Steps completed when it ended."""
    message: str = ""
    component: str | None = None
    nodes: tuple[str, ...] = ()
    """Nodes at fault."""
    stop_reason: Reason | None = None
    decision: Literal["done", "requeue", "fresh", "stop"] | None = None
    """What followed; None for one that died: Slurm decided."""
    why: str = ""
    exit_code: int | None = None
    excluded: tuple[str, ...] = ()
    """Nodes that the fresh job does without."""
    successor: str | None = None
    """The fresh job that was submitted."""
    at: float
    """When the line was written."""

    @property
    def progress(self) -> bool:
        """It completed more steps than any attempt before it."""
        return self.step > self.step_before


def read_history(run_folder: Path) -> list[PastAttempt]:
    """All lines, oldest attempt first; of two lines for one attempt the later counts."""
    path = run_folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {}
    for line in lines:
        try:
            past = PastAttempt.model_validate_json(line)
        except ValueError:      # the last line of a leader that died while it wrote
            continue
        found[past.attempt] = past
    return [found[number] for number in sorted(found)]


def append(run_folder: Path, past: PastAttempt) -> None:
    """Add a line, durably: what follows may be the end of this process."""
    with (run_folder / FILE).open("a", encoding="utf-8") as file:
        file.write(past.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def record_of(attempt: Attempt, job_id: str, outcome: Outcome, before: Sequence[PastAttempt]) -> PastAttempt:
    """The line of an attempt that has ended, without what follows from it."""
    return PastAttempt(attempt=attempt.number, job_id=job_id, status=outcome.status, step_before=best_step(before),
                       step=outcome.step, message=outcome.message, component=outcome.component, nodes=outcome.nodes,
                       stop_reason=_reason(attempt, outcome), at=time.time())


def _reason(attempt: Attempt, outcome: Outcome) -> Reason | None:
    """Why it was asked to stop, where that is how it ended: in order, or by Slurm before it could."""
    return stop_reason(attempt.folder) if outcome.status in ("stopped", "interrupted") else None


def chain(history: Sequence[PastAttempt], job_id: str) -> list[PastAttempt]:
    """The attempts that led to `job_id` without a person in between: its own requeues, and the jobs that submitted it.
    Caps count these: whoever submits a run anew has looked at it."""
    ours, found = {job_id}, []
    for past in reversed(history):
        if past.job_id not in ours and past.successor not in ours:
            break
        ours.add(past.job_id)
        found.append(past)
    return found[::-1]


def best_step(history: Sequence[PastAttempt]) -> int:
    """Most steps completed by any of them."""
    return max((past.step for past in history), default=0)


def close_open_attempts(run_folder: Path) -> tuple[list[PastAttempt], list[PastAttempt]]:
    """Add a line for every attempt that has none: its leader died before it could. Call it with the run's lock held.

    Returns:
        (the whole history, those that were added).
    """
    history, added = read_history(run_folder), []
    known = {past.attempt for past in history}
    for folder in attempts_of(run_folder):
        if int(folder.name) in known:
            continue
        attempt = Attempt(folder)
        past = record_of(attempt, job_of(folder) or "", _outcome_of(attempt),
                         [each for each in history if each.attempt < attempt.number])
        append(run_folder, past)
        history.append(past)
        added.append(past)
    return sorted(history, key=lambda past: past.attempt), added


def _outcome_of(attempt: Attempt) -> Outcome:
    """What the attempt wrote itself, or else `died`, with the nodes that went before the others."""
    written = read_outcome(attempt.folder)
    if written is not None:
        return written
    nodes = tuple(node_files.vanished(attempt))
    who = f"{', '.join(nodes)} fell silent first" if nodes else "no node fell silent before the others"
    outcome = Outcome(status="died", step=steps_done(read_progress(attempt.folder)), nodes=nodes,
                      message=f"the job ended without a word: {who}")
    write_outcome(attempt.folder, outcome)
    return outcome
