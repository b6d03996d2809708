"""How long before the end of its time limit a job must be told to stop: its last step ends, a checkpoint is written.
Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.config.schema import RunConfig
from launch.errors import UserError
from launch.planner.plan import Plan
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

    @property
    def checkpoint_s(self) -> float:
        return self.checkpoint_bytes / self.rate

    @property
    def total_s(self) -> float:
        return self.step_s + self.checkpoint_s + RESERVE_S

    @property
    def text(self) -> str:
        """The sum, in words."""
        return (f"{self.step_s:.0f} s (slowest step of the plan's range) + {self.checkpoint_s:.0f} s (checkpoint, "
                f"{self.checkpoint_bytes / 1e9:.1f} GB at {self.rate / 1e9:.1f} GB/s) + {RESERVE_S:.0f} s = "
                f"{self.total_s:.0f} s")


def needed(plan: Plan, profile: Profile) -> Needed:
    """What this plan needs. The plan must hold a forecast."""
    forecast = plan.forecast
    numbers = {number.key: number.value for number in forecast.numbers}
    bandwidth = numbers["coefficients.reliability.checkpoint_bandwidth"] * forecast.split.training
    size = round(forecast.reliability.checkpoint_s * bandwidth)
    if profile.file_system_gb_per_s is not None:
        rate = profile.file_system_gb_per_s * 1e9
    else:
        rate = size / forecast.reliability.checkpoint_s
    return Needed(forecast.step_high_s, size, rate)


def stop_margin(config: RunConfig, plan: Plan, profile: Profile) -> int:
    """Seconds before the end at which the job is told to stop: `run.stop_margin_s`; where that is auto, what the plan
    needs in whole minutes, at least the profile's.

    Raises:
        UserError: a margin that is too short for the plan, with the sum.
    """
    need = needed(plan, profile)
    asked = config.run.stop_margin_s
    if asked == "auto":
        return min(LONGEST_S, max(math.ceil(need.total_s / 60) * 60, math.ceil(profile.stop_margin_s or 0)))
    if asked < need.total_s:
        raise UserError(f"run.stop_margin_s = {asked:g} is too short: a stop needs {need.text}",
                        where="run.stop_margin_s", fix=f"use {math.ceil(need.total_s)} or more, or auto")
    return min(LONGEST_S, math.ceil(asked))
