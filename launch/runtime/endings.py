"""Outcomes that the launcher writes if the job itself could not, on this machine and on a cluster."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from launch.config.resolved import ResolvedConfig
from launch.run import progress as progress_file
from launch.run.attempts import Attempt
from launch.run.components import Failure
from launch.run.outcome import Outcome, Status, read_outcome
from launch.runtime import hang
from launch.slurm.step import LOST, failed_nodes, refused

MOST_AT_FAULT = 0.5
"""If more than this share of at least three nodes fails in the same way, the nodes are not at fault."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def ended(attempt: Attempt, status: Status, message: str, component: str | None = None, log: str | None = None,
          nodes: Sequence[str] = ()) -> Outcome:
    """How the attempt ended, with the steps that its progress file shows."""
    done = progress_file.steps_done(progress_file.read_progress(attempt.folder))
    return Outcome(status=status, step=done, message=message, component=component, log=log, nodes=tuple(nodes))


def failed(attempt: Attempt, failure: Failure) -> Outcome:
    """The outcome of a reported or observed failure: a user error or a crash."""
    return ended(attempt, "user_error" if failure.user_error else "crash", failure.message, failure.component,
                 failure.log)


def hung(attempt: Attempt, config: ResolvedConfig, step: int, late: Sequence[progress_file.Span],
         stacks: list[hang.Stack]) -> Outcome:
    """The outcome of a hang, with the absent processes and the overdue spans of the step. If the job has ended in the
    meantime, returns the outcome that it wrote."""
    written = read_outcome(attempt.folder)
    if written is not None:
        return written
    guilty = hang.absent(stacks)
    told = [f"no progress for {progress_file.allowed_s(span, config):.0f} s in step {step}, phase {span.name}"
            for span in late]
    message = "\n".join([*told, hang.explain(stacks), f"stacks: {attempt.folder / 'stacks'}"])
    name = guilty[0].name if guilty else None
    return ended(attempt, "hang", message, name, str(attempt.logs / f"{name}.log") if name else None)


def during_start_up(attempt: Attempt) -> Outcome:
    """The outcome of a stop before the first step."""
    return ended(attempt, "stopped", "during start-up: no step was trained")


def no_space(attempt: Attempt, error: OSError) -> Outcome:
    """A full disk is a user error. Other errors are raised again."""
    if error.errno not in NO_SPACE:
        raise error
    return ended(attempt, "user_error", f"no space left to write {error.filename or attempt.folder}: free some, or set "
                                        "run.dir to another disk. Complete checkpoints are untouched")


class EndedEarly(Exception):
    """The step ended before its supervisors started."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def before_it_began(attempt: Attempt, status: int, log: Path, nodes: Sequence[str]) -> Outcome:
    """The outcome of a step that could not be started or whose supervisors ended at once. The output of srun tells
    whether a node or the user is at fault.

    Args:
        status: exit status of srun.
        nodes: nodes of the job.
    """
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    lines = text.splitlines()
    said = " / ".join([line for line in lines if "error:" in line][:5] or lines[-5:])
    message = f"srun ended with status {status} before the supervisors started: {said}"
    failed = tuple(node for node in failed_nodes(text) if node in nodes)
    everywhere = len(nodes) > 1 and (len(failed) == len(nodes) or
                                     len(nodes) > 2 and len(failed) > MOST_AT_FAULT * len(nodes))
    if refused(text) or everywhere and not LOST.search(text):
        return ended(attempt, "user_error", message, "srun", str(log))
    if failed and not everywhere:
        return ended(attempt, "node_failure", f"{', '.join(failed)} did not start its task; {message}", "srun",
                     str(log), failed)
    return ended(attempt, "crash", message, "srun", str(log))
