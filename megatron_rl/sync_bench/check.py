"""Whether the sync of a plan can be measured here or on an allocation. Light, because it runs before anything is
started."""

from __future__ import annotations

from typing import Literal

import psutil

from launch.errors import UserError
from launch.planner.prepare import OnCluster, Prepared, PreparedForecast

MOST_PROCESSES = 16


def check(prepared: Prepared, on: Literal["local", "slurm"] = "local") -> PreparedForecast:
    """The plan with its prediction, checked before anything is started.

    Args:
        on: this machine, or the nodes of the job that this process belongs to.

    Raises:
        UserError: the plan is for another place, has no sync, or is too large for this one.
    """
    loaded = prepared.loaded
    if on == "local" and isinstance(prepared, OnCluster):
        raise UserError(f"the plan is for {loaded.config.cluster}, but the measurement is on this machine",
                        where=loaded.where("cluster"),
                        fix="measure its nodes in an allocation with --on slurm, or add cluster=local, with sizes that "
                            "fit here: trainer.tp=1 trainer.pp=1 trainer.dp=1 rollout.tp=1 rollout.replicas=1")
    if on == "slurm" and not isinstance(prepared, OnCluster):
        raise UserError("the plan is for this machine, but --on slurm measures the nodes of an allocation",
                        where=loaded.where("cluster"),
                        fix="name their cluster file: cluster=configs/clusters/h100x2.yaml")
    if not isinstance(prepared, PreparedForecast) or prepared.found.sync is None:
        raise UserError(prepared.plan.no_forecast or "this plan transfers no weights", where=loaded.path,
                        fix="plan with placement.mode=disaggregated, and with a workload that can be predicted")
    if not (prepared.model_folder / "config.json").is_file():
        raise UserError("the workers build the model from its config.json, which does not exist in "
                        f"{prepared.model_folder}",
                        where=loaded.where("model.path"), fix="give the model's folder")
    if on == "local":
        _check_size(prepared, prepared.found.sync.replica_bytes)
    return prepared


def _check_size(prepared: PreparedForecast, replica_bytes: int) -> None:
    training, rollout = prepared.found.training.layout, prepared.found.rollout.layout
    count = training.gpus + rollout.gpus
    if count > MOST_PROCESSES:
        raise UserError(f"the plan has {training.gpus} training ranks and {rollout.gpus} rollout workers: {count} "
                        f"processes, but at most {MOST_PROCESSES} can be measured on one machine",
                        where=prepared.loaded.path, fix="lower trainer.dp, trainer.tp or rollout.replicas")
    if prepared.plan.device == "cpu":
        copies = training.dp * training.cp + 2 * rollout.replicas           # two per engine: its shadow is measured too
        needed = replica_bytes * copies
        available = psutil.virtual_memory().available
        if needed > available:
            raise UserError(f"the weights of all ranks and engines need {needed / 1e9:.1f} GB, but only "
                            f"{available / 1e9:.1f} GB of memory are free", where=prepared.loaded.path,
                            fix="measure with a smaller model.path, trainer.dp=1 or rollout.replicas=1")
