"""Turns everything that asks a job to stop into the stop file: signals to the leader, and its own deadline."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from types import FrameType

from launch import early_signals
from launch.files.shared import seen
from launch.run.attempts import Attempt
from launch.run.metrics import metric_rows
from launch.run.node_files import TERMINATED, stamp
from launch.run.stop import Reason, ask_to_stop, stop_requested
from launch.slurm.client import Slurm
from launch.slurm.job_facts import JobFacts
from launch.slurm.margin import PORTABLE_S, measured_s
from launch.slurm.records import JobRecord, ahead_s
from launch.slurm.refusals import SlurmError

EARLY_S = 120.0
"""Slurm may send a signal this many seconds early."""
MEASURE_EVERY_S = 60.0
ASK_EVERY_S = 2.0
"""The supervisors of all nodes get TERM at the same time, but their reports arrive at different times."""


class Signals:
    """Signals to this process, recorded from its first statement on and handled by a `StopClock`: Slurm's signal may
    arrive before the leader has an attempt."""

    def __init__(self) -> None:
        self.noted: list[int] = []
        for number in early_signals.CAUGHT:
            signal.signal(number, self._note)
        self.noted[:0] = early_signals.take()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)


class JobIsOver(Exception):
    """Slurm has ended the job, so that nothing can be finished."""


class StopClock:
    """Writes the stop file; the first request's reason counts. USR1 near the time limit means the time limit, otherwise
    a preemption warning or a user request. TERM means a preemption with a grace time, or that Slurm ends the job."""

    def __init__(self, attempt: Attempt, facts: JobFacts, slurm: Slurm, signals: Signals,
                 say: Callable[[str], None]) -> None:
        self.attempt, self.facts, self.slurm, self.say = attempt, facts, slurm, say
        self.margin_s: float = PORTABLE_S
        """Seconds that the plan needs to stop."""
        self.warned_in_time = True
        """Whether Slurm's signal before the time limit arrives when the job must begin to end. False: the batch script
        requests it long before (a rehearsal saves nothing), and it is ignored."""
        self.end_time = facts.end_time
        self._signals = signals.noted
        self._asked_again = self._preempted = False
        self._terminated = False
        """Whether this process got TERM and has not yet asked Slurm what it means."""
        self._step_terminated: float | None = None
        self._asked_at = -math.inf
        self._measured, self._measured_at = 0.0, 0.0

    def tick(self) -> None:
        """Called repeatedly. Writes the stop file after a signal or at the deadline.

        Raises:
            JobIsOver: Slurm has ended the job.
        """
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGUSR1 and not self.warned_in_time:
                continue
            self._terminated |= number != signal.SIGUSR1
            self._stop(*self._meaning(number))
        if time.monotonic() - self._asked_at > ASK_EVERY_S:
            self._ask_whether_over()
        left = self._left()
        if left is None or left > self._margin() or stop_requested(self.attempt.folder):
            return
        if not self._asked_again:       # the limit may have been raised since, so ask Slurm once more first
            self._asked_again = True
            self._refresh()
            return self.tick()
        self._stop("time-limit", f"{left:.0f} s before the end of the time limit")

    def _meaning(self, number: int) -> tuple[Reason, str]:
        name = signal.Signals(number).name
        if number != signal.SIGUSR1:
            return "preemption", name
        left = self._left()
        if left is not None and left > self._margin() + EARLY_S:
            self._refresh()             # the limit may have been lowered since, or the job may be preempted
            left = self._left()
        if self._preempted:
            return "preemption", f"{name}, {left or 0:.0f} s before Slurm takes the nodes"
        if left is not None and left <= self._margin() + EARLY_S:
            return "time-limit", f"{name}, {left:.0f} s before the end of the time limit"
        return "signal", name

    def _left(self) -> float | None:
        return None if self.end_time is None else self.end_time - time.time()

    def _stop(self, reason: Reason, detail: str) -> None:
        if ask_to_stop(self.attempt.folder, reason, detail):
            self.say(f"stop requested ({reason}: {detail}): stopping after the current step, with a checkpoint")

    def _margin(self) -> float:
        """The planned margin, or more if the steps so far took longer."""
        if time.monotonic() - self._measured_at > MEASURE_EVERY_S or not self._measured_at:
            self._measured_at = time.monotonic()
            rows = metric_rows(self.attempt.folder / "metrics.jsonl")
            steps_s, writes_s = ([row[name] for row in rows if name in row]
                                 for name in ("time/step", "time/checkpoint_write"))
            self._measured = measured_s(steps_s, writes_s)
        return max(self.margin_s, self._measured)

    def _ask_whether_over(self) -> None:
        """If TERM arrived at this process or the step since the last query, ask Slurm what it means. With a grace time
        it announces a preemption, and the job continues until the grace time ends. Otherwise Slurm has ended the job
        (`scancel`, the time limit, a preemption without grace) and will kill it in a few seconds."""
        file = self.attempt.folder / TERMINATED
        step = stamp(file) if seen(file) else None
        if not self._terminated and step == self._step_terminated:
            return
        self._asked_at = time.monotonic()
        record = self._refresh()
        if record is None:
            return
        self._terminated, self._step_terminated = False, step
        if record.state != "RUNNING":
            why = f" ({record.reason})" if record.reason not in ("", "None") else ""
            raise JobIsOver(f"Slurm ends this job: {record.state}{why}")
        left = self._left()
        if left is not None:
            self.say(f"{'preempted' if self._preempted else 'TERM'}: Slurm ends this job in {left:.0f} s")

    def _refresh(self) -> JobRecord | None:
        asked = time.time()
        try:
            record = self.slurm.show_job(self.facts.job_id)
        except SlurmError as error:
            self.say(f"could not read the state and end of this job from Slurm: {error.what}")
            return None
        self.end_time = None if record.ends is None else record.ends - ahead_s(record, asked, time.time())
        self._preempted = record.fields.get("PreemptTime", "None") not in ("None", "Unknown")
        return record
