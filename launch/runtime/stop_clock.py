"""Everything that asks a job to stop, made into the one stop file: signals to the leader, and its own deadline."""

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
"""A signal of Slurm's may come this much before its time."""
MEASURE_EVERY_S = 60.0
ASK_EVERY_S = 2.0
"""The supervisors of all nodes get TERM at the same moment, and are not heard of at the same moment."""


class Signals:
    """Signals to this process, noted from its first statement on, and acted upon by a `StopClock`: Slurm's signal may
    come before the leader has an attempt."""

    def __init__(self) -> None:
        self.noted: list[int] = []
        for number in early_signals.CAUGHT:
            signal.signal(number, self._note)
        self.noted[:0] = early_signals.take()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)


class JobIsOver(Exception):
    """Slurm has ended the job: nothing can be finished any more."""


class StopClock:
    """The first request's reason holds: USR1 near the end of the time limit is the time limit, USR1 at another time a
    preemption's warning or somebody's wish, TERM a preemption with a grace time, or Slurm ending the job."""

    def __init__(self, attempt: Attempt, facts: JobFacts, slurm: Slurm, signals: Signals,
                 say: Callable[[str], None]) -> None:
        self.attempt, self.facts, self.slurm, self.say = attempt, facts, slurm, say
        self.margin_s: float = PORTABLE_S
        """What the plan needs."""
        self.warned_in_time = True
        """Slurm's signal before the time limit comes when the job must begin to end. False: the batch script asks for
        it long before (a rehearsal saves nothing), and it means nothing."""
        self.end_time = facts.end_time
        self._signals = signals.noted
        self._asked_again = self._preempted = False
        self._terminated = False
        """This process got TERM, and Slurm has not been asked since what it means."""
        self._step_terminated: float | None = None
        self._asked_at = -math.inf
        self._measured, self._measured_at = 0.0, 0.0

    def tick(self) -> None:
        """Called again and again: a signal or the deadline becomes the stop file.

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
        if not self._asked_again:       # the limit may have been raised since: one more question, before it counts
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
            self._refresh()             # the limit may have been lowered since, or the job preempted
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
            self.say(f"stop asked for ({reason}: {detail}): the current step ends, a checkpoint is written")

    def _margin(self) -> float:
        """The planned margin, or more if the steps so far took longer."""
        if time.monotonic() - self._measured_at > MEASURE_EVERY_S or not self._measured_at:
            self._measured_at = time.monotonic()
            rows = metric_rows(self.attempt.folder / "metrics.jsonl")
            self._measured = measured_s([row["time/step"] for row in rows if "time/step" in row],
                                        [row["time/checkpoint"] for row in rows if "time/checkpoint" in row])
        return max(self.margin_s, self._measured)

    def _ask_whether_over(self) -> None:
        """Where TERM came, to this process or to the step, since Slurm was asked last: what does it mean? With a grace
        time it is a preemption's first word, and the job goes on until the grace is over; else Slurm has ended the job
        (`scancel`, the time limit, a preemption without grace) and kills what is left in some seconds."""
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
            self.say(f"asked Slurm for the state and the end of this job: {error.what}")
            return None
        self.end_time = None if record.ends is None else record.ends - ahead_s(record, asked, time.time())
        self._preempted = record.fields.get("PreemptTime", "None") not in ("None", "Unknown")
        return record
