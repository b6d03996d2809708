"""Whether the sync of a plan can be measured on this machine. Light: it is asked before anything is started."""

from __future__ import annotations

import psutil

from launch.errors import UserError
from launch.planner.prepare import Prepared

MOST_PROCESSES = 16


def check(prepared: Prepared) -> None:
    """Before anything is started.

    Raises:
        UserError: the plan is not for this machine, or is too large for it.
    """
    loaded = prepared.loaded
    if prepared.planned is not None:
        raise UserError(f"this is planned for {loaded.config.cluster}, and what is measured is this machine",
                        where=loaded.where("cluster"),
                        fix="add cluster=local, with sizes that fit here: trainer.tp=1 trainer.pp=1 trainer.dp=1 "
                            "rollout.tp=1 rollout.replicas=1")
    if prepared.found is None or prepared.found.sync is None:
        raise UserError(prepared.plan.no_forecast or "no weights travel in this plan", where=loaded.path,
                        fix="plan with placement.mode=disaggregated, and with a workload that can be predicted")
    training, rollout = prepared.found.training.layout, prepared.found.rollout.layout
    count = training.gpus + rollout.gpus
    if count > MOST_PROCESSES:
        raise UserError(f"the plan has {training.gpus} training ranks and {rollout.gpus} rollout workers: {count} "
                        f"processes, and at most {MOST_PROCESSES} are measured on one machine", where=loaded.path,
                        fix="lower trainer.dp, trainer.tp or rollout.replicas")
    if prepared.plan.device == "cpu":
        needed = prepared.found.sync.replica_bytes * (training.dp * training.cp + rollout.replicas)
        available = psutil.virtual_memory().available
        if needed > available:
            raise UserError(f"the weights of all ranks and engines are {needed / 1e9:.1f} GB, and "
                            f"{available / 1e9:.1f} GB of memory are free", where=loaded.path,
                            fix="measure with a smaller model.path, trainer.dp=1 or rollout.replicas=1")
