"""The task that submitit runs for one point of a sweep: the launcher, in the job's batch shell.

The node imports it under this name. It contains only strings and numbers.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from launch import envvars, processes
from launch.run.find import attempts_of
from launch.run.outcome import Outcome, read_outcome
from launch.run.stop import ask_to_stop

LOOK_EVERY_S = 1.0


class PointFailed(RuntimeError):
    """A run of the sweep failed. submitit marks its job as failed."""


@dataclass(frozen=True)
class SweepTask:
    """Run one point to its end. Called by submitit on the first node of the point's job."""

    run_folder: str
    """`<run.dir>/<run.name>`, absolute."""
    words: tuple[str, ...]
    """Arguments of `python -m launch`: `launch CONFIG ... --on local`, or `job CONFIG ...` on several nodes."""
    log: str
    """File for the launcher's output."""
    stop_after_s: float | None = None
    """Seconds after which the run is asked to stop with a checkpoint, because a run on one machine does not know the
    time limit. None: the job's leader reads the limit from Slurm."""

    def __call__(self) -> dict[str, object]:
        """Run the point and return a summary of its outcome.

        Raises:
            PointFailed: the run neither finished nor was stopped.
        """
        before, started = attempts_before(Path(self.run_folder)), time.monotonic()
        command = [sys.executable, "-m", "launch", *self.words]
        child = processes.start("launcher", command, log=Path(self.log), environment=envvars.inherited())
        asked = False
        while child.wait(LOOK_EVERY_S) is None:
            if not asked and self.stop_after_s is not None and time.monotonic() - started > self.stop_after_s:
                asked = self._stop(before)
        return self._judged(before, child.returncode)

    def _stop(self, before: int) -> bool:
        """Ask the newest attempt to stop. Returns False if there is none yet."""
        attempts = attempts_after(Path(self.run_folder), before)
        if attempts:
            ask_to_stop(attempts[-1], "time-limit")
        return bool(attempts)

    def _judged(self, before: int, status: int | None) -> dict[str, object]:
        outcome = outcome_after(Path(self.run_folder), before)
        if outcome is None:
            raise PointFailed(f"the launcher ended with status {status} without an outcome; its output: {self.log}")
        if outcome.status not in ("finished", "stopped"):
            raise PointFailed(f"{outcome.status}: {outcome.message}; its output: {self.log}")
        return {"status": outcome.status, "step": outcome.step, "run": self.run_folder}


def attempts_before(run_folder: Path) -> int:
    """The number of the newest attempt; 0 if there is none. Attempts are compared by number, not by time: the same
    sweep may be submitted again within a second of its last attempt's end, and file systems have their own clocks."""
    attempts = attempts_of(run_folder)
    return int(attempts[-1].name) if attempts else 0


def attempts_after(run_folder: Path, before: int) -> list[Path]:
    """Attempts with a higher number than `before`, oldest first."""
    return [attempt for attempt in attempts_of(run_folder) if int(attempt.name) > before]


def outcome_after(run_folder: Path, before: int) -> Outcome | None:
    """The outcome of the newest attempt after number `before`; None if there is none, or it has not ended."""
    attempts = attempts_after(run_folder, before)
    return read_outcome(attempts[-1]) if attempts else None
