"""When a job must begin to end: the time limit minus the margin. The signal that Slurm sends before the limit may come
a minute early or, to a process that is not the batch shell, never: the leader keeps its own deadline. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESERVE_S = 60.0
"""For processes to end, files to be seen, and Slurm to be asked."""


@dataclass(frozen=True)
class Deadline:
    """When to stop."""

    end_time: float | None
    """Unix time at which the time limit ends the job; None without a limit."""
    margin_s: float

    def left_s(self, now: float) -> float | None:
        """Seconds until the job has to begin to end; negative when that has passed, None without a limit."""
        return None if self.end_time is None else self.end_time - self.margin_s - now

    def due(self, now: float) -> bool:
        left = self.left_s(now)
        return left is not None and left <= 0


def margin_s(planned_s: float, steps_s: Sequence[float], checkpoints_s: Sequence[float]) -> float:
    """The margin to keep: the planned one, or what this job's own slowest step and checkpoint ask for, if that is more.
    Half as much again for a checkpoint: all jobs of a cluster may write at the same hour.

    Args:
        planned_s: `launch.slurm.margin.stop_margin`.
        steps_s, checkpoints_s: seconds of each so far.
    """
    return max(planned_s, max(steps_s, default=0.0) + 1.5 * max(checkpoints_s, default=0.0) + RESERVE_S)
