"""`attempts.jsonl`: one line for each attempt of a run, in the run's folder. The next attempt reads it first, and adds
a line for an attempt that died silently: when a node fails, Slurm restarts the job, and the old leader is dead.
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
    """One line of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    attempt: int
    job_id: str
    status: Status
    step_before: int
    """Maximum number of steps that any earlier attempt had completed."""
    step: int
    """Steps completed when the attempt ended."""
    message: str = ""
    component: str | None = None
    nodes: tuple[str, ...] = ()
    """Nodes at fault."""
    stop_reason: Reason | None = None
    decision: Literal["done", "requeue", "fresh", "stop"] | None = None
    """What followed; None if the attempt died, because Slurm then decided."""
    why: str = ""
    exit_code: int | None = None
    excluded: tuple[str, ...] = ()
    """Nodes that the new job excludes."""
    successor: str | None = None
    """The new job that was submitted."""
    at: float
    """When the line was written."""

    @property
    def progress(self) -> bool:
        """Whether it completed more steps than every attempt before it."""
        return self.step > self.step_before


def read_history(run_folder: Path) -> list[PastAttempt]:
    """All lines, oldest attempt first. A later line for the same attempt replaces an earlier one."""
    path = run_folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {}
    for line in lines:
        try:
            past = PastAttempt.model_validate_json(line)
        except ValueError:      # the leader died while it wrote its last line
            continue
        found[past.attempt] = past
    return [found[number] for number in sorted(found)]


def append(run_folder: Path, past: PastAttempt) -> None:
    """Add a line and sync it, because this process may end next."""
    with (run_folder / FILE).open("a", encoding="utf-8") as file:
        file.write(past.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def record_of(attempt: Attempt, job_id: str, outcome: Outcome, before: Sequence[PastAttempt]) -> PastAttempt:
    """The line of an attempt that has ended, without the decision on what follows."""
    stopped = outcome.status in ("stopped", "interrupted")      # or Slurm ended it before it could stop
    return PastAttempt(attempt=attempt.number, job_id=job_id, status=outcome.status,
                       step_before=max((past.step for past in before), default=0), step=outcome.step,
                       message=outcome.message, component=outcome.component, nodes=outcome.nodes,
                       stop_reason=stop_reason(attempt.folder) if stopped else None, at=time.time())


def chain(history: Sequence[PastAttempt], job_id: str) -> list[PastAttempt]:
    """The attempts that led to `job_id` without user action: its own requeues, and the jobs that submitted it. The caps
    count only these, because a user who submits the run again has looked at it."""
    ours, found = {job_id}, []
    for past in reversed(history):
        if past.job_id not in ours and past.successor not in ours:
            break
        ours.add(past.job_id)
        found.append(past)
    return found[::-1]


def close_open_attempts(run_folder: Path) -> tuple[list[PastAttempt], list[PastAttempt]]:
    """Add a line for every attempt without one, whose leader died before writing it. Requires the run's lock.

    Returns:
        (the whole history, the added lines).
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
    """The outcome that the attempt wrote, or else `died`, with the nodes that fell silent before the others."""
    written = read_outcome(attempt.folder)
    if written is not None:
        return written
    nodes = tuple(node_files.vanished(attempt))
    who = f"{', '.join(nodes)} fell silent first" if nodes else "no node fell silent before the others"
    outcome = Outcome(status="died", step=steps_done(read_progress(attempt.folder)), nodes=nodes,
                      message=f"the job ended without an outcome: {who}")
    write_outcome(attempt.folder, outcome)
    return outcome
