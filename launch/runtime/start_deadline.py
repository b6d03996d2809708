"""How long the processes of a job may take to start: a 70B model takes longer to read, build and compile than a tiny
one. Pure."""

from __future__ import annotations

from launch.config.load import LoadedConfig
from launch.plan.plan import ForecastPlan
from launch.planner.prepare import OnCluster
from launch.run.faults import trains
from launch.slurm.margin import needed
from launch.slurm.profiles import Profile

ENGINE_S = 600.0
"""Seconds to read libraries on all nodes from a shared file system, and to compile and capture CUDA graphs."""
BUSY = 3.0
"""Slow-down factor of reading and first writing a checkpoint, with all ranks at once and other jobs active."""
STEPS = 2.0
"""Slow-down factor of the first step, which compiles kernels, opens connections and fills caches."""
IMAGE_S = 1800.0
"""Seconds to fetch and unpack a container image of tens of gigabytes before a node's first process starts."""


def start_deadline_s(loaded: LoadedConfig, plan: ForecastPlan, profile: Profile) -> float:
    """`run.deadline_s` if the user set it or nothing large starts (a rehearsal); else the time that this plan may take,
    at least the default."""
    asked = loaded.config.run.deadline_s
    source = loaded.sources.get("run.deadline_s")
    if source is not None and source.kind in ("file", "override") or not trains(loaded.config):
        return asked
    engine_s = ENGINE_S if plan.device == "gpu" else asked
    need = needed(plan, profile)
    return max(asked, engine_s + BUSY * need.checkpoint_s, STEPS * need.step_s)


def with_start_deadline(made: OnCluster, profile: Profile) -> OnCluster:
    """The job plan with this deadline in its configuration, where the processes of the job read it."""
    return made.changed({"run.deadline_s": start_deadline_s(made.loaded, made.plan, profile)})


def greeting_s(deadline_s: float, profile: Profile) -> float:
    """Seconds that the supervisor of a node may take to greet."""
    return deadline_s + (IMAGE_S if profile.container.kind != "none" else 0.0)
