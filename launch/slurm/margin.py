"""How long before the end of its time limit a job must be told to stop: its last step ends, a checkpoint is written.
By the plan, and by what the job has measured since. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.plan.plan import ForecastPlan
from launch.slurm.profiles import Profile

RESERVE_S = 60.0
"""For the barrier, the outcome and the end of all processes; Slurm's own signal may come a minute off too."""
PORTABLE_S = 600
"""Of a batch script that is written before there is a plan."""
LONGEST_S = 65535
"""sbatch --signal holds no more."""


@dataclass(frozen=True)
class Needed:
    """Seconds between the request to stop and the end."""

    step_s: float
    """The slow end of the plan's range for a step."""
    checkpoint_bytes: int
    rate: float
    """bytes/s at which a checkpoint is written."""
    disk_bytes: int = 0
    """Written and read back by a version of the weights on disk (`weight_sync.disk`) that was begun with the step."""

    @property
    def checkpoint_s(self) -> float:
        return self.checkpoint_bytes / self.rate

    @property
    def disk_s(self) -> float:
        return self.disk_bytes / self.rate

    @property
    def total_s(self) -> float:
        return self.step_s + self.disk_s + self.checkpoint_s + RESERVE_S

    @property
    def text(self) -> str:
        """The sum, in words."""
        disk = f"{self.disk_s:.0f} s (a version to disk) + " if self.disk_bytes else ""
        return (f"{self.step_s:.0f} s (slowest step of the plan's range) + {disk}{self.checkpoint_s:.0f} s "
                f"(checkpoint, {self.checkpoint_bytes / 1e9:.1f} GB at {self.rate / 1e9:.1f} GB/s) + {RESERVE_S:.0f} s "
                f"= {self.total_s:.0f} s")


def needed(plan: ForecastPlan, profile: Profile) -> Needed:
    """What this plan needs."""
    forecast = plan.forecast
    numbers = {number.key: number.value for number in forecast.numbers}
    bandwidth = numbers["coefficients.reliability.checkpoint_bandwidth"] * forecast.split.training
    size = round(forecast.reliability.checkpoint_s * bandwidth)
    if profile.file_system_gb_per_s is not None:
        rate = profile.file_system_gb_per_s * 1e9
    else:
        rate = size / forecast.reliability.checkpoint_s
    disk = 2 * forecast.sync.disk.bytes if forecast.sync.disk else 0
    return Needed(forecast.step_high_s, size, rate, disk)


def stop_margin(config: ResolvedConfig, plan: ForecastPlan, profile: Profile) -> int:
    """Seconds before the end at which the job is told to stop: `run.stop_margin_s`; where that is auto, what the plan
    needs in whole minutes, at least the profile's. A rehearsal needs the reserve only.

    Raises:
        UserError: a margin that is too short for the plan, with the sum.
    """
    need = needed(plan, profile)
    asked = config.run.stop_margin_s
    if asked != "auto" and asked < need.total_s:
        raise UserError(f"run.stop_margin_s = {asked:g} is too short: a stop needs {need.text}",
                        where="run.stop_margin_s", fix=f"use {math.ceil(need.total_s)} or more, or auto")
    if config.run.rehearse:
        return math.ceil(RESERVE_S)     # it saves nothing
    if asked == "auto":
        return min(LONGEST_S, max(math.ceil(need.total_s / 60) * 60, math.ceil(profile.stop_margin_s or 0)))
    return min(LONGEST_S, math.ceil(asked))


def measured_s(steps_s: Sequence[float], checkpoints_s: Sequence[float]) -> float:
    """What a job's own slowest step and checkpoint ask for; half as much again for a checkpoint, as all jobs of a
    cluster may write at the same hour.

    Args:
        steps_s, checkpoints_s: seconds of each so far.
    """
    return max(steps_s, default=0.0) + 1.5 * max(checkpoints_s, default=0.0) + RESERVE_S


def explained(config: ResolvedConfig, plan: ForecastPlan, profile: Profile) -> str:
    """The margin and what it is made of, for who submits."""
    seconds = stop_margin(config, plan, profile)
    why = "a rehearsal saves nothing" if config.run.rehearse else f"needed: {needed(plan, profile).text}"
    return f"{seconds} s before the end of the time limit; {why}"


def check_time_left(left_s: float | None, limit: str, margin_s: float, need: Needed) -> None:
    """A job must have time to work before it is told to stop.

    Args:
        left_s: seconds to the end of the time limit; None without one.
        limit: the time limit, as Slurm writes it.

    Raises:
        UserError: the job would stop at once, with the sum that the margin is made of.
    """
    if left_s is not None and left_s <= margin_s:
        raise UserError(f"the time limit {limit} leaves {left_s:.0f} s, and the job is told to stop {margin_s:.0f} s "
                        f"before its end: it would stop at once; a stop needs {need.text}",
                        where="sbatch --time", fix="give more time: the margin, the start-up, and the steps to be made")
