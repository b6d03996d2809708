"""The steps from a configuration to a checked plan, shared by `plan` and `launch`.

A configuration is loaded, checked once against its model, and turned into a `Problem` (`launch.planner.from_config`).
The planner never reads it again. The result comes back as values of the open keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from launch.cluster import local
from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.config import auto, locate
from launch.config.checks import cautions, check, check_runnable
from launch.config.load import LoadedConfig, load_config
from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.builtin import from_builtin, known
from launch.model.hf_config import from_hf_config
from launch.plan.forecast import Forecast, Warned
from launch.plan.plan import ForecastPlan, Plan
from launch.planner.explain.forecast import forecast
from launch.planner.explain.remedies import with_nodes
from launch.planner.from_config import chosen_values, least, plan_of, problem_of
from launch.planner.here import is_here, pinned_candidate, this_machine
from launch.planner.planning import best_of, check_links
from launch.planner.search.candidate import Candidate
from launch.planner.search.pins import check_pins
from launch.planner.search.problem import Problem
from launch.planner.seats.cluster import Seating, place
from launch.run.faults import trains


@dataclass(frozen=True)
class Prepared:
    """A configuration that is complete, checked and planned."""

    loaded: LoadedConfig
    """The configuration as written, with the places for messages."""
    config: ResolvedConfig
    """The configuration that runs: with the values of `plan.chosen`."""
    model_folder: Path
    plan: Plan


@dataclass(frozen=True)
class PreparedForecast(Prepared):
    """A prepared configuration with a forecast."""

    plan: ForecastPlan
    found: Candidate
    """The candidate of the plan."""


@dataclass(frozen=True)
class OnCluster(PreparedForecast):
    """A prepared configuration with a forecast and a seating on the nodes of a cluster."""

    seating: Seating
    needed: int
    """Number of nodes that the plan uses."""

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster of the plan."""
        return self.found.problem.cluster

    @property
    def spares(self) -> int:
        """Number of additional nodes that the user asks for."""
        return self.config.placement.spare_nodes

    def changed(self, values: dict[str, Any]) -> OnCluster:
        """The same plan with other values of some keys."""
        chosen = {**self.plan.chosen, **values}
        return replace(self, config=self.loaded.resolved(chosen).config,
                       plan=self.plan.model_copy(update={"chosen": chosen}))


def prepare(path: str, words: Sequence[str] = (), device: Literal["auto", "cpu", "gpu"] = "auto", *,
            to_run: bool = False, cluster: ClusterSpec | None = None) -> Prepared:
    """Load, check against the model and the machine or cluster, and plan.

    Returns:
        An `OnCluster` for a cluster. For this machine a `PreparedForecast`, or a plain `Prepared` if nothing can be
        predicted of it.

    Args:
        to_run: also check the tokenizer, the weights and the data files, which only a run on this machine needs. A plan
            needs only config.json, or the name of a built-in architecture.
        cluster: plan for this cluster instead of the configuration's `cluster:`.

    Raises:
        UserError: a step fails.
    """
    loaded = load_config(path, words)
    named = cluster or _cluster_of(loaded)
    if to_run:
        check_runnable(loaded, here=is_here(named), on="local")
    return _on_this_machine(loaded, named, device, to_run) if is_here(named) else prepare_for(loaded, named)


def prepare_job(path: str, words: Sequence[str] = (), cluster: ClusterSpec | None = None) -> OnCluster:
    """Load, check and plan a configuration that will run as a Slurm job. A rehearsal needs only what a plan needs.

    Args:
        cluster: the allocated nodes, instead of the configuration's `cluster:`.

    Raises:
        UserError: as `prepare`, or the configuration is for this machine.
    """
    loaded = load_config(path, words)
    named = cluster or _cluster_of(loaded)
    check_runnable(loaded, here=is_here(named), on="slurm")
    return prepare_for(loaded, named, to_run=True)


def _cluster_of(loaded: LoadedConfig) -> ClusterSpec | None:
    """The cluster of a configuration; None for this machine."""
    return None if loaded.config.cluster == "local" else load_cluster(loaded.config.cluster)


def prepare_for(loaded: LoadedConfig, cluster: ClusterSpec | None = None, *, to_run: bool = False) -> OnCluster:
    """The best plan of a configuration for a cluster, with its forecast.

    Args:
        to_run: the model's weights and the data files must exist, unless this is a rehearsal.

    Raises:
        UserError: as `posed`, or as `launch.planner.planning.best_of` if nothing fits.
    """
    model = model_of(loaded)
    if to_run and trains(loaded.config):
        locate.check_model_files(loaded)
        locate.check_data_files(loaded)
    problem = posed(loaded, cluster, model)
    teacher = problem.teacher
    search, found = best_of(problem)
    chosen = chosen_values(found, loaded)
    config = loaded.resolved(chosen).config
    plan = plan_of(config, model, problem.cluster.gpu.device, chosen, teacher).predicted(
        _with_cautions(forecast(search, found, problem.sources(chosen)), config))
    seating = place(found.training.layout, found.rollout.layout, problem.cluster, mode=found.mode,
                    spares=problem.spare_nodes, gpu_order=found.sync.gpu_order if found.sync else (),
                    tp_across_nodes=problem.pins.tp_across_nodes)
    split = plan.forecast.split
    return OnCluster(loaded, config, Path(config.model.path), plan, found, seating, split.training + split.rollout)


def posed(loaded: LoadedConfig, cluster: ClusterSpec | None = None, model: Architecture | None = None, *,
          largest: int | None = None) -> Problem:
    """The problem of a configuration, checked against its model and the cluster.

    Args:
        cluster: replaces the configuration's `cluster:`.
        model: the model, if it was read before.
        largest: the largest cluster size of a sweep, in nodes. The pinned sizes need to be possible only there.

    Raises:
        UserError: sizes contradict each other; there is no such model folder or built-in model; the cluster file cannot
            be used.
    """
    if cluster is None and loaded.config.cluster == "local":
        raise UserError("this is planned for a cluster, and the configuration runs on this machine",
                        fix="add --cluster configs/clusters/h100x32.yaml, or another file",
                        where=loaded.where("cluster"))
    spec = cluster or load_cluster(loaded.config.cluster)
    architecture = model or model_of(loaded)
    teacher = teacher_of(loaded)
    problem = problem_of(loaded, architecture, spec, teacher)
    check_pins(problem if largest is None else problem.on(with_nodes(spec, largest)))
    check(least(loaded, problem, architecture), architecture, spec.gpu.device, teacher=teacher)
    return problem


def model_of(loaded: LoadedConfig, key: str = "model.path") -> Architecture:
    """The model of a configuration, for a plan only: a folder, or the name of a built-in model.

    Raises:
        UserError: it is neither.
    """
    name = loaded.value(key)
    if not Path(name).is_dir() and (known(name) or "/" not in name):
        return from_builtin(name, loaded.where(key))
    return from_hf_config(locate.model_folder(loaded, key), planning=True)


def teacher_of(loaded: LoadedConfig) -> Architecture | None:
    """The teacher of a configuration, as `model_of`; None if it has none."""
    return None if loaded.value(locate.TEACHER) is None else model_of(loaded, locate.TEACHER)


def _on_this_machine(loaded: LoadedConfig, described: ClusterSpec | None, device: Literal["auto", "cpu", "gpu"],
                     to_run: bool) -> Prepared:
    """Plan without a search. Keys that are `auto` follow the rules for one machine.

    Args:
        described: the cluster file that describes this machine, if any.
    """
    chosen = auto.local_values(loaded.config)
    resolved = loaded.resolved(chosen)
    folder = locate.model_folder(loaded)
    architecture = locate.check_model_files(loaded) if to_run else from_hf_config(folder)
    if to_run:
        locate.check_data_files(loaded)
    teacher = teacher_of(loaded)
    kind = local.device(device)
    count = len(local.gpus()) if kind == "gpu" else 0
    # A plan for GPUs can be made on a machine without any; a run cannot.
    check(resolved, architecture, kind, gpus=count if kind == "gpu" and (to_run or count) else None, teacher=teacher)
    plan = plan_of(resolved.config, architecture, kind, chosen, teacher)

    def unpredicted(why: UserError) -> Prepared:
        return Prepared(loaded, resolved.config, folder, plan.model_copy(update={"no_forecast": why.what}))

    try:
        machine = this_machine(kind, plan, resolved.config.trainer.threads, described)
    except UserError as error:              # there are no figures for this GPU
        return unpredicted(error)
    try:
        problem = problem_of(resolved, architecture, machine, teacher)
    except UserError as error:              # wrong assumptions about the data do not affect a run
        if not to_run:
            raise
        return unpredicted(error)
    found = pinned_candidate(problem, plan)
    check_links(found)
    sources = {**problem.sources(), "cluster": machine.sources.get("cluster", "this machine"), "trainer": loaded.path,
               "rollout": loaded.path}
    predicted = plan.predicted(_with_cautions(forecast(None, found, sources), resolved.config))
    return PreparedForecast(loaded, resolved.config, folder, predicted, found)


def _with_cautions(made: Forecast, config: ResolvedConfig) -> Forecast:
    """The forecast, with the warnings that the configuration alone shows."""
    more = tuple(Warned(code=code, message=message) for code, message in cautions(config))
    return made.model_copy(update={"warnings": (*made.warnings, *more)})

