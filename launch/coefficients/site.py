"""All coefficients of a plan: the calibrated defaults, replaced by measurements from the cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from launch.coefficients.base import Coefficients
from launch.coefficients.collectives import CollectiveCoefficients
from launch.coefficients.memory import MemoryCoefficients
from launch.coefficients.reliability import ReliabilityCoefficients
from launch.coefficients.reward import RewardCoefficients
from launch.coefficients.rl import RlCoefficients
from launch.coefficients.rollout import RolloutCoefficients
from launch.coefficients.sync import SyncCoefficients
from launch.coefficients.training import TrainingCoefficients


@dataclass(frozen=True)
class SiteCoefficients:
    """The coefficients of all models."""

    training: TrainingCoefficients = TrainingCoefficients()
    collectives: CollectiveCoefficients = CollectiveCoefficients()
    memory: MemoryCoefficients = MemoryCoefficients()
    rollout: RolloutCoefficients = RolloutCoefficients()
    sync: SyncCoefficients = SyncCoefficients()
    rl: RlCoefficients = RlCoefficients()
    reward: RewardCoefficients = RewardCoefficients()
    reliability: ReliabilityCoefficients = ReliabilityCoefficients()

    @staticmethod
    def of(measured: Mapping[str, float]) -> SiteCoefficients:
        """The defaults with `measured` (key in the book -> value) applied. The cluster file's reader has already
        refused unknown keys."""
        defaults = SiteCoefficients()
        changed = {}
        for member in fields(defaults):
            group = getattr(defaults, member.name)
            values = {each.name: measured[f"{group.PREFIX}.{each.name}"] for each in fields(group)
                      if f"{group.PREFIX}.{each.name}" in measured}
            changed[member.name] = group.changed(values)
        return SiteCoefficients(**changed)

    @property
    def groups(self) -> tuple[Coefficients, ...]:
        """The coefficients of all models."""
        return tuple(getattr(self, member.name) for member in fields(self))
