"""What follows the end of an attempt: one table. Pure.

    finished                            done; the run's jobs that wait are cancelled
    stopped by the user                 stop
    stopped for the time limit          requeue; stop after two in a row without a new step
    stopped for preemption or a signal  requeue
    ended by Slurm before the           as if it had been stopped: the steps since the last checkpoint are made again
      checkpoint was complete
    hardware fault, node failure        a fresh job with --exclude, or a requeue where no node is to blame; stop after
                                        three in a row without a new step
    hang, crash, further than before    requeue, at most twice in a row; a fresh job without a node that it
                                        happened on twice
    hang, crash, no further             requeue once; stop after two in a row
    preflight: too few fit nodes        a fresh job with --exclude once, then stop
    user error, interrupted             stop

*Further* means: more steps completed than any earlier attempt of the run. A crash that comes back at the same step
makes no progress, however many steps were repeated to reach it. Whatever the rule, `run.max_attempts` attempts in a row
that were not stopped in order after new steps are the last: a run of many time limits goes on, one that only fails does
not. With `run.max_attempts` = 1 no attempt follows another.
"""

from __future__ import annotations

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
"""Requeues after crashes that were further than any before."""
WITHOUT_PROGRESS = 2
FAULTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    action: Action
    """`requeue`: this job again. `fresh`: a new job, without the nodes of `exclude`. `done`, `stop`: nothing."""
    exit_code: ExitCode
    why: str
    exclude: tuple[str, ...] = ()
    by_slurm: bool = False
    """Slurm does it by itself: nothing is to be done."""

    @property
    def ends_the_run(self) -> bool:
        return self.action in ("done", "stop")


def decide(ended: PastAttempt, before: Sequence[PastAttempt], max_attempts: int) -> Decision:
    """What follows an attempt.

    Args:
        ended: the attempt that has just ended.
        before: the earlier attempts of the run, oldest first.
        max_attempts: `run.max_attempts`.
    """
    decision = _RULES[ended.status](ended, before)
    if not decision.ends_the_run and (max_attempts == 1 or _counted([*before, ended]) >= max_attempts):
        return Decision("stop", decision.exit_code or ExitCode.UNFINISHED,
                        f"{decision.why}; but the run has had its {max_attempts} attempts (run.max_attempts)")
    return decision


def may_start(before: Sequence[PastAttempt], max_attempts: int) -> Decision | None:
    """Whether the history forbids an attempt: None if not. Slurm restarts a job whose node failed without asking us, so
    the next attempt asks first."""
    if _counted(before) >= max_attempts:
        return Decision("stop", ExitCode.NO_PROGRESS, f"the run has had its {max_attempts} attempts (run.max_attempts)")
    if _in_a_row(before, lambda past: past.status == "died" and _lost_a_node(past)) >= FAULTS_WITHOUT_PROGRESS:
        return Decision("stop", ExitCode.NO_PROGRESS,
                        f"{FAULTS_WITHOUT_PROGRESS} attempts in a row died before they had completed a new step")
    return None


def _finished(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    return Decision("done", ExitCode.OK, f"all {ended.step} steps are made" if ended.step else ended.message)


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
    """Time limits that end before a new step is complete would go on doing so. A preemption or a signal may come at any
    moment, and says nothing of the next."""
    def holds(past: PastAttempt) -> bool:
        return past.status in ("stopped", "interrupted") and past.stop_reason == "time-limit" and not past.progress

    if _in_a_row([*before, ended], holds) < WITHOUT_PROGRESS:
        return None
    return Decision("stop", ExitCode.NO_PROGRESS,
                    f"{WITHOUT_PROGRESS} attempts in a row ended at the time limit before they had completed a new "
                    "step: it is too short for start-up, a step and a checkpoint")


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
                            f"{row + 1} attempts in a row lost a node before they had completed a new step: that is "
                            "the cluster, or a check that is wrong")
    if not ended.nodes:
        return Decision("requeue", code, f"{what}, and no node is to blame")
    return Decision("fresh", code, f"{what}: {', '.join(ended.nodes)}", ended.nodes)


def _unfit(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    if not ended.nodes:
        return Decision("stop", ExitCode.PREFLIGHT, "it failed for a reason that other nodes would not mend")
    if before and before[-1].status == "preflight":
        return Decision("stop", ExitCode.PREFLIGHT, "too few fit nodes for the second time in a row")
    return Decision("fresh", ExitCode.PREFLIGHT, f"too few fit nodes without {', '.join(ended.nodes)}", ended.nodes)


def _users(ended: PastAttempt, before: Sequence[PastAttempt]) -> Decision:
    return Decision("stop", EXIT_CODES[ended.status], "to be mended by the user first")


_RULES: dict[str, Callable[[PastAttempt, Sequence[PastAttempt]], Decision]] = {
    "finished": _finished, "stopped": _stopped, "crash": _crashed, "hang": _crashed, "hardware_fault": _faulty,
    "node_failure": _faulty, "died": _faulty, "preflight": _unfit, "user_error": _users, "interrupted": _interrupted}


def _lost_a_node(past: PastAttempt) -> bool:
    """It lost a node before a new step. One that died with all its nodes at once was ended by Slurm: a preemption
    without notice, or an administrator's requeue."""
    return past.status in FAULTS and not past.progress and (past.status != "died" or bool(past.nodes))


def _counted(history: Sequence[PastAttempt]) -> int:
    """Attempts since the newest one that was stopped in order after new steps."""
    return _in_a_row(history, lambda past: not (past.status == "stopped" and past.progress))


def _in_a_row(before: Sequence[PastAttempt], holds: Callable[[PastAttempt], bool]) -> int:
    """How many of the newest attempts a property holds for."""
    count = 0
    for past in reversed(before):
        if not holds(past):
            break
        count += 1
    return count
