"""Decides what follows the end of an attempt, by one table. Pure.

    finished                            done; waiting jobs of the run are cancelled
    stopped by the user                 stop
    stopped for the time limit          requeue; stop after two in a row without a new step
    stopped for preemption or a signal  requeue
    ended by Slurm before the           as if stopped; the steps since the last checkpoint are repeated
      checkpoint was complete
    hardware fault, node failure        new job with --exclude, or requeue if no node is to blame; stop after three in a
                                        row without a new step
    hang, crash, with progress          requeue, at most twice in a row; new job without a node on which it happened
                                        twice
    hang, crash, without progress       requeue once; stop after two in a row
    preflight: too few fit nodes        new job with --exclude once, then stop
    user error, interrupted             stop

*Progress* means more completed steps than any earlier attempt of the run. A crash that recurs at the same step makes no
progress, however many steps were repeated to reach it. In addition, the run stops after `run.max_attempts` attempts in
a row, not counting attempts that made new steps and were stopped with a checkpoint: a run with many time limits
continues, and a run that only fails stops. With `run.max_attempts` = 1 no attempt follows another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from launch.exit_codes import ExitCode
from launch.run.attempt_log import PastAttempt
from launch.run.outcome import EXIT_CODES

Action = Literal["done", "requeue", "fresh", "stop"]
CRASHES = ("crash", "hang")
FAULTS = ("hardware_fault", "node_failure", "died")
CRASHES_IN_A_ROW = 2
"""Maximum requeues in a row after crashes with progress."""
WITHOUT_PROGRESS = 2
FAULTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Decision:
    """What follows."""

    action: Action
    """`requeue`: this job again. `fresh`: a new job without the nodes in `exclude`. `done`, `stop`: nothing."""
    exit_code: ExitCode
    why: str
    exclude: tuple[str, ...] = ()
    by_slurm: bool = False
    """Slurm does it itself, so that no action is needed."""

    @property
    def ends_the_run(self) -> bool:
        return self.action in ("done", "stop")


def decide(ended: PastAttempt, before: Sequence[PastAttempt], max_attempts: int) -> Decision:
    """Decide what follows an attempt.

    Args:
        ended: the attempt that just ended.
        before: the earlier attempts of the run, oldest first.
        max_attempts: `run.max_attempts`.
    """
    decision = _RULES[ended.status](ended, before)
    if not decision.ends_the_run and (max_attempts == 1 or _counted([*before, ended]) >= max_attempts):
        return Decision("stop", decision.exit_code or ExitCode.UNFINISHED,
                        f"{decision.why}; but the run has had its {max_attempts} attempts (run.max_attempts)")
    return decision


def may_start(before: Sequence[PastAttempt], max_attempts: int) -> Decision | None:
    """The decision if the history forbids an attempt, else None. Slurm restarts a job after a node failure without a
    decision of ours, so the next attempt calls this first."""
    if _counted(before) >= max_attempts:
        return Decision("stop", ExitCode.NO_PROGRESS, f"the run has had its {max_attempts} attempts (run.max_attempts)")
    if _in_a_row(before, lambda past: past.status == "died" and _lost_a_node(past)) >= FAULTS_WITHOUT_PROGRESS:
        return Decision("stop", ExitCode.NO_PROGRESS,
                        f"{FAULTS_WITHOUT_PROGRESS} attempts in a row died before completing a new step")
    return None


def _finished(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    return Decision("done", ExitCode.OK, f"all {ended.step} steps are complete" if ended.step else ended.message)


def _stopped(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    if ended.stop_reason in (None, "user"):
        return Decision("stop", ExitCode.OK, "stopped on request, with a checkpoint")
    return _stood_still(ended, before) or Decision(
        "requeue", ExitCode.OK, f"stopped for {ended.stop_reason} with a checkpoint of step {ended.step}")


def _interrupted(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    if ended.stop_reason in (None, "user"):
        return Decision("stop", ExitCode.INTERRUPTED, "interrupted")
    return _stood_still(ended, before) or Decision(
        "requeue", ExitCode.INTERRUPTED, f"ended by Slurm before the checkpoint for {ended.stop_reason} was complete")


def _stood_still(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision | None:
    """Stop if the time limit is too short to complete a new step, which would recur. A preemption or a signal may come
    at any time and does not predict the next one."""
    def holds(past: PastAttempt) -> bool:
        return past.status in ("stopped", "interrupted") and past.stop_reason == "time-limit" and not past.progress

    if _in_a_row([*before, ended], holds) < WITHOUT_PROGRESS:
        return None
    return Decision("stop", ExitCode.NO_PROGRESS,
                    f"{WITHOUT_PROGRESS} attempts in a row reached the time limit before completing a new step: it is "
                    "too short for start-up, a step and a checkpoint")


def _crashed(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    code = EXIT_CODES[ended.status]
    if not ended.progress:
        if _in_a_row(before, lambda past: past.status in CRASHES and not past.progress) >= WITHOUT_PROGRESS - 1:
            return Decision("stop", ExitCode.NO_PROGRESS,
                            f"{WITHOUT_PROGRESS} attempts in a row failed without completing a new step")
        return Decision("requeue", code, f"a {ended.status} without a new step, for the first time")
    row = _in_a_row(before, lambda past: past.status in CRASHES)
    if row >= CRASHES_IN_A_ROW:
        return Decision("stop", code, f"{row + 1} attempts in a row ended in a crash or a hang")
    again = tuple(node for node in ended.nodes if row and node in before[-1].nodes)
    if again:
        return Decision("fresh", code, f"a {ended.status} on {', '.join(again)} for the second time in a row", again)
    return Decision("requeue", code, f"a {ended.status} after new steps")


def _faulty(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    code = ExitCode.HARDWARE_FAULT
    what = "hardware fault" if ended.status == "hardware_fault" else "node failure"
    if not ended.progress:
        row = _in_a_row(before, _lost_a_node)
        if row >= FAULTS_WITHOUT_PROGRESS - 1:
            return Decision("stop", ExitCode.NO_PROGRESS,
                            f"{row + 1} attempts in a row lost a node before completing a new step: the cause is the "
                            "cluster, or a check that is wrong")
    if not ended.nodes:
        return Decision("requeue", code, f"{what} without a node to blame")
    return Decision("fresh", code, f"{what}: {', '.join(ended.nodes)}", ended.nodes)


def _unfit(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    if not ended.nodes:
        return Decision("stop", ExitCode.PREFLIGHT, "the failure would recur on other nodes")
    if before and before[-1].status == "preflight":
        return Decision("stop", ExitCode.PREFLIGHT, "too few fit nodes for the second time in a row")
    return Decision("fresh", ExitCode.PREFLIGHT, f"too few fit nodes without {', '.join(ended.nodes)}", ended.nodes)


def _users(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    return Decision("stop", EXIT_CODES[ended.status], "the user must fix this first")


_RULES: dict[str, Callable[[PastAttempt, Sequence[PastAttempt]], Decision]] = {
    "finished": _finished, "stopped": _stopped, "crash": _crashed, "hang": _crashed, "hardware_fault": _faulty,
    "node_failure": _faulty, "died": _faulty, "preflight": _unfit, "user_error": _users, "interrupted": _interrupted}


def _lost_a_node(past: PastAttempt) -> bool:
    """Whether the attempt lost a node before a new step. If all its nodes died at once, Slurm ended it: a preemption
    without notice, or an administrator's requeue."""
    return past.status in FAULTS and not past.progress and (past.status != "died" or bool(past.nodes))


def _counted(history: Sequence[PastAttempt]) -> int:
    """Number of attempts since the newest one that made new steps and was stopped with a checkpoint."""
    return _in_a_row(history, lambda past: not (past.status == "stopped" and past.progress))


def _in_a_row(before: Sequence[PastAttempt], holds: Callable[[PastAttempt], bool]) -> int:
    """For how many of the newest attempts in a row a property holds."""
    return len(list(itertools.takewhile(holds, reversed(before))))
