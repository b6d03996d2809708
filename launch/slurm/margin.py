"""How long before its time limit a job must stop, so that it can finish its last step and write a checkpoint.
Computed from the plan and from the job's own measurements. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.plan.plan import ForecastPlan
from launch.slurm.profiles import Profile

RESERVE_S = 60.0
"""Seconds for the barrier, the outcome and the end of all processes. Slurm's own signal may also be a minute off."""
PORTABLE_S = 600
"""Margin of a batch script that is written without a plan, in seconds."""
LONGEST_S = 65535
"""Maximum of sbatch --signal, in seconds."""


@dataclass(frozen=True)
class Needed:
    """Seconds needed between the stop request and the end."""

    step_s: float
    """Upper end of the plan's range for a step."""
    checkpoint_bytes: int
    rate: float
    """bytes/s at which a checkpoint is written."""
    disk_bytes: int = 0
    """Bytes written and read back for a weight version on disk (`weight_sync.disk`) that began with the step."""

    @property
    def checkpoint_s(self) -> float:
        return self.checkpoint_bytes / self.rate

    @property
    def disk_s(self) -> float:
        return self.disk_bytes / self.rate

    @property
    def earlier_s(self) -> float:
        """What a checkpoint takes longer that began before the last step, and is still written beside it."""
        return max(0.0, self.checkpoint_s - self.step_s - self.disk_s)

    @property
    def total_s(self) -> float:
        return self.step_s + self.disk_s + self.earlier_s + self.checkpoint_s + RESERVE_S

    @property
    def text(self) -> str:
        """The sum as text."""
        disk = f"{self.disk_s:.0f} s (a version to disk) + " if self.disk_bytes else ""
        earlier = f"{self.earlier_s:.0f} s (the checkpoint before it) + " if self.earlier_s else ""
        return (f"{self.step_s:.0f} s (slowest step of the plan's range) + {disk}{earlier}{self.checkpoint_s:.0f} s "
                f"(checkpoint, {self.checkpoint_bytes / 1e9:.1f} GB at {self.rate / 1e9:.1f} GB/s) + {RESERVE_S:.0f} s "
                f"= {self.total_s:.0f} s")


def needed(plan: ForecastPlan, profile: Profile) -> Needed:
    """The margin that this plan needs."""
    forecast = plan.forecast
    size = forecast.reliability.checkpoint_bytes
    if profile.file_system_gb_per_s is not None:
        rate = profile.file_system_gb_per_s * 1e9
    else:
        rate = size / forecast.reliability.checkpoint_s
    disk = 2 * forecast.sync.disk.bytes if forecast.sync.disk else 0
    return Needed(forecast.step_high_s, size, rate, disk)


def stop_margin(config: ResolvedConfig, plan: ForecastPlan, profile: Profile) -> int:
    """Seconds before the end at which the job is asked to stop: `run.stop_margin_s`. If that is auto, the plan's need
    in whole minutes, at least the profile's margin. A rehearsal needs only the reserve.

    Raises:
        UserError: the margin is too short for the plan; the message contains the sum.
    """
    need = needed(plan, profile)
    asked = config.run.stop_margin_s
    if asked != "auto" and asked < need.total_s:
        raise UserError(f"run.stop_margin_s = {asked:g} is too short: a stop needs {need.text}",
                        where="run.stop_margin_s", fix=f"use {math.ceil(need.total_s)} or more, or auto")
    if config.run.rehearse:
        return math.ceil(RESERVE_S)     # a rehearsal saves nothing
    if asked == "auto":
        return min(LONGEST_S, max(math.ceil(need.total_s / 60) * 60, math.ceil(profile.stop_margin_s or 0)))
    return min(LONGEST_S, math.ceil(asked))


def measured_s(steps_s: Sequence[float], checkpoints_s: Sequence[float]) -> float:
    """The margin from a job's own slowest step and checkpoint: the last step, beside which an earlier checkpoint may
    still be written, and the last checkpoint. Checkpoints count 1.5 times, because other jobs of the cluster may write
    at the same time.

    Args:
        steps_s, checkpoints_s: seconds of each step and of writing each checkpoint so far.
    """
    write_s = 1.5 * max(checkpoints_s, default=0.0)
    return max(write_s, max(steps_s, default=0.0)) + write_s + RESERVE_S


def explained(config: ResolvedConfig, plan: ForecastPlan, profile: Profile) -> str:
    """The margin and its parts, for the user who submits."""
    seconds = stop_margin(config, plan, profile)
    why = "a rehearsal saves nothing" if config.run.rehearse else f"needed: {needed(plan, profile).text}"
    return f"{seconds} s before the end of the time limit; {why}"


def check_time_left(left_s: float | None, limit: str, margin_s: float, need: Needed) -> None:
    """Check that a job has time to work before it is asked to stop.

    Args:
        left_s: seconds to the end of the time limit; None without one.
        limit: the time limit, as Slurm writes it.

    Raises:
        UserError: the job would stop at once; the message contains the parts of the margin.
    """
    if left_s is not None and left_s <= margin_s:
        raise UserError(f"the time limit {limit} leaves {left_s:.0f} s, but the job stops {margin_s:.0f} s before "
                        f"its end, so it would stop at once; a stop needs {need.text}",
                        where="sbatch --time", fix="give time for the margin, the start-up and the steps")
