"""From the command line's words to a checked plan: the steps that `plan` and `launch` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.cluster import local
from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.config import auto, locate
from launch.config.checks import check, check_runnable
from launch.config.load import LoadedConfig, load_config
from launch.errors import UserError
from launch.model.architecture import Architecture, from_hf_config
from launch.model.builtin import architecture_for_planning, from_architecture, from_builtin, known
from launch.model.folder import check_model_folder
from launch.model.shape import ModelShape
from launch.plan.plan import Plan
from launch.planner.build import plan
from launch.planner.here import is_here, local_forecast, pinned_candidate, this_machine
from launch.planner.planning import Planned, plan_on_cluster
from launch.planner.search.candidate import Candidate
from launch.planner.workload.workload import workload_of
from launch.run.faults import trains


@dataclass(frozen=True)
class Prepared:
    """A configuration that is complete, checked and planned."""

    loaded: LoadedConfig
    model_folder: Path
    architecture: Architecture
    plan: Plan
    planned: Planned | None = None
    """With its seats, where it was planned for a cluster."""
    found: Candidate | None = None
    """The plan in numbers; None where nothing was predicted (`plan.no_forecast`)."""


@dataclass(frozen=True)
class Inputs:
    """What a plan for a cluster is made from."""

    loaded: LoadedConfig
    architecture: Architecture
    shape: ModelShape
    cluster: ClusterSpec


def prepare(path: str, words: Sequence[str] = (), device: Literal["auto", "cpu", "gpu"] = "auto", *,
            to_run: bool = False, on: Literal["local", "slurm"] = "local",
            cluster: ClusterSpec | None = None) -> Prepared:
    """Load, check against the model and the machine or cluster, and plan.

    Args:
        to_run: also check what only a run needs: tokenizer, complete weights, data files. A plan needs config.json, or
            the name of a built-in architecture; a rehearsal needs no more.
        on: where it is to run.
        cluster: plan for this instead of `cluster:` of the configuration.

    Raises:
        UserError: see the steps.
    """
    loaded = load_config(path, words)
    named = cluster or (None if loaded.config.cluster == "local" else load_cluster(loaded.config.cluster))
    if not is_here(named):
        if to_run:
            check_runnable(loaded, here=False, on=on)
        inputs = planning_inputs(loaded, named)
        if to_run and trains(loaded.config):
            _check_files(loaded)
        planned = plan_on_cluster(inputs.loaded, inputs.architecture, inputs.shape, inputs.cluster,
                                  inputs.cluster.gpu.device)
        return Prepared(planned.loaded, Path(loaded.config.model.path), inputs.architecture, planned.plan, planned,
                        planned.found)
    loaded = loaded.with_values(auto.local_values(loaded.config), "auto")
    if to_run:
        check_runnable(loaded, here=True, on=on)
    folder = locate.model_folder(loaded)
    architecture = _check_files(loaded) if to_run else from_hf_config(folder)
    kind = local.device(device)
    count = len(local.gpus()) if kind == "gpu" else 0
    # A plan for GPUs can be made on a machine without any; a run cannot.
    check(loaded, architecture, kind, gpus=count if kind == "gpu" and (to_run or count) else None)
    made = plan(loaded.config, architecture, kind)
    shape = from_architecture(architecture, folder.name)
    try:
        machine = this_machine(kind, made, loaded.config, named)
        missing = check_workload(loaded) if to_run else ""
    except UserError as error:              # a GPU without figures
        missing = error.what
    if missing:
        return Prepared(loaded, folder, architecture, made.model_copy(update={"no_forecast": missing}))
    found = pinned_candidate(loaded, shape, made, machine)
    made = made.model_copy(update={"forecast": local_forecast(loaded, found)})
    return Prepared(loaded, folder, architecture, made, found=found)


def check_workload(loaded: LoadedConfig) -> str:
    """What the configuration assumes of its data changes no run: what is wrong with it, for a run that goes on without a
    forecast; empty if nothing is."""
    try:
        workload_of(loaded)
    except UserError as error:
        return error.what
    return ""


def _check_files(loaded: LoadedConfig) -> Architecture:
    """What only a run needs is there: tokenizer, complete weights, data files."""
    folder = locate.model_folder(loaded)
    architecture = check_model_folder(folder, weights=loaded.config.model.init == "load",
                                      where=f"{loaded.where('model.path')}: {folder.absolute()}")
    locate.check_data_files(loaded)
    return architecture


def planning_inputs(loaded: LoadedConfig, cluster: ClusterSpec | None = None) -> Inputs:
    """Model and cluster of a configuration that is only planned.

    Raises:
        UserError: no such model folder or built-in model, or a cluster file that cannot be used.
    """
    if cluster is None and loaded.config.cluster == "local":
        raise UserError("this is planned for a cluster, and the configuration runs on this machine", fix="add --cluster "
                        "configs/clusters/h100x32.yaml, or another file", where=loaded.where("cluster"))
    spec = cluster or load_cluster(loaded.config.cluster)
    name, where = loaded.config.model.path, loaded.where("model.path")
    if not Path(name).is_dir() and (known(name) or "/" not in name):
        architecture, label = from_builtin(name, where), known(name) or name
    else:
        folder = locate.model_folder(loaded)
        architecture, label = architecture_for_planning(folder), folder.name
    return Inputs(loaded, architecture, from_architecture(architecture, label), spec)
