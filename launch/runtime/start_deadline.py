"""How long the processes of a job may take to start: a model of 70B is read, built and compiled for longer than a tiny
one. Pure."""

from __future__ import annotations

from launch.config.load import LoadedConfig
from launch.plan.plan import ForecastPlan
from launch.planner.prepare import OnCluster
from launch.run.faults import trains
from launch.slurm.margin import needed
from launch.slurm.profiles import Profile

ENGINE_S = 600.0
"""Libraries read by all nodes at once from a shared file system, an engine that compiles and captures CUDA graphs."""
BUSY = 3.0
"""A checkpoint is read, and written for the first time, by everybody and beside other jobs: this much slower."""
STEPS = 2.0
"""The first step compiles kernels, opens connections and fills caches."""
IMAGE_S = 1800.0
"""A container's image of tens of gigabytes is fetched and unpacked before the first process of a node starts."""


def start_deadline_s(loaded: LoadedConfig, plan: ForecastPlan, profile: Profile) -> float:
    """`run.deadline_s` where the user has set it, and where nothing large starts (a rehearsal); else what this plan may
    take, at least the default."""
    asked = loaded.config.run.deadline_s
    source = loaded.sources.get("run.deadline_s")
    if source is not None and source.kind in ("file", "override") or not trains(loaded.config):
        return asked
    engine_s = ENGINE_S if plan.device == "gpu" else asked
    need = needed(plan, profile)
    return max(asked, engine_s + BUSY * need.checkpoint_s, STEPS * need.step_s)


def with_start_deadline(made: OnCluster, profile: Profile) -> OnCluster:
    """The same with this deadline in its configuration: that is what the processes of the job read."""
    return made.changed({"run.deadline_s": start_deadline_s(made.loaded, made.plan, profile)})


def greeting_s(deadline_s: float, profile: Profile) -> float:
    """How long the supervisor of a node may take to greet."""
    return deadline_s + (IMAGE_S if profile.container.kind != "none" else 0.0)
