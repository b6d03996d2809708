"""A plan for fewer nodes than were planned for: engines go first, since a step then only takes longer; then data
parallel replicas. Model parallel sizes, the batch and everything else stay. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launch.cluster.spec import ClusterSpec
from launch.config.checks import check
from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.planner.build import plan
from launch.planner.explain.forecast import forecast
from launch.planner.here import pinned_candidate
from launch.planner.planning import Planned, sources_of
from launch.planner.prepare import Prepared
from launch.planner.seats.cluster import nodes_needed


@dataclass(frozen=True)
class Sizes:
    """What a smaller plan changes."""

    dp: int
    replicas: int
    training_nodes: int
    nodes: int
    """All that it needs."""

    def __str__(self) -> str:
        return f"{self.replicas} engine(s), trainer.dp {self.dp}, {self.nodes} node(s)"


def sizes_for(nodes: int, prepared: Prepared, cluster: ClusterSpec) -> Sizes | None:
    """The largest sizes that fit: all data parallel replicas and as many engines as possible; if not one engine fits,
    the next smaller divisor of DP. None if nothing does."""
    return next((sizes for sizes in _candidates(prepared, cluster) if sizes.nodes <= nodes), None)


def for_fewer(nodes: int, prepared: Prepared, cluster: ClusterSpec, min_nodes: int | None) -> tuple[Prepared, Sizes]:
    """The plan for `nodes` nodes.

    Args:
        prepared: the plan that needs more.
        cluster: the nodes' kind; its node names do not matter.
        min_nodes: `run.min_nodes`; None: no fewer than planned.

    Raises:
        UserError: fewer nodes than `min_nodes`, or nothing fits; exit code PREFLIGHT.
    """
    whole = next(_candidates(prepared, cluster))
    if min_nodes is None or nodes < min_nodes:
        least = f"run.min_nodes = {min_nodes}" if min_nodes is not None else "run.min_nodes is not set"
        raise UserError(f"{nodes} fit node(s), the plan needs {whole.nodes}, and {least}", where="run.min_nodes",
                        fix=f"set run.min_nodes to at most {nodes} to go on with a smaller plan, or add spare nodes",
                        exit_code=ExitCode.PREFLIGHT)
    sizes = sizes_for(nodes, prepared, cluster)
    if sizes is None:
        raise UserError(f"no part of the plan fits {nodes} fit node(s): one data parallel replica and one engine need "
                        "more",
                        where="trainer.tp, trainer.pp, rollout.tp", fix="plan for fewer nodes, or give more",
                        exit_code=ExitCode.PREFLIGHT)
    return _planned(sizes, prepared, cluster), sizes


def _candidates(prepared: Prepared, cluster: ClusterSpec) -> Iterator[Sizes]:
    """From the plan itself down."""
    planned = prepared.planned
    assert planned is not None, "a job on a cluster was planned for a cluster"
    training, rollout, mode = planned.found.training.layout, planned.found.rollout.layout, planned.found.mode
    for dp in (dp for dp in range(training.dp, 0, -1) if training.dp % dp == 0):
        fewer = replace(training, dp=dp)
        alone = nodes_needed(fewer, replace(rollout, replicas=0), cluster, mode)
        for replicas in range(rollout.replicas, 0, -1):
            needed = (_cpu_nodes(planned, fewer, replicas, cluster) if cluster.gpu.device == "cpu" else
                      (alone, nodes_needed(fewer, replace(rollout, replicas=replicas), cluster, mode)))
            yield Sizes(dp, replicas, *needed)


def _cpu_nodes(planned: Planned, training: TrainingLayout, replicas: int, cluster: ClusterSpec) -> tuple[int, int]:
    """(nodes that train, all nodes) as `launch.planner.seats.local.place_cpu` spreads them: as many processes a
    node as planned."""
    split = planned.plan.forecast.split
    whole, engines = planned.found.training.layout, planned.found.rollout.layout.replicas
    train = max(1, split.training * training.dp // whole.dp)
    a_node = -(-engines // max(1, split.rollout))
    return train, train + -(-replicas // a_node)


def _planned(sizes: Sizes, prepared: Prepared, cluster: ClusterSpec) -> Prepared:
    """The plan with these sizes, checked and forecast."""
    planned = prepared.planned
    loaded: LoadedConfig = prepared.loaded.with_values(
        {"trainer.dp": sizes.dp, "rollout.replicas": sizes.replicas, "placement.training_nodes": sizes.training_nodes},
        "planner")
    check(loaded, prepared.architecture, prepared.plan.device)
    made = plan(loaded.config, prepared.architecture, prepared.plan.device)
    mode = planned.found.mode
    found = pinned_candidate(loaded, planned.found.problem.shape, made, cluster, mode)
    made = made.model_copy(update={"forecast": forecast(None, found, sources_of(loaded, cluster))})
    return replace(prepared, loaded=loaded, plan=made, planned=replace(planned, loaded=loaded, plan=made, found=found))


def layouts(prepared: Prepared) -> tuple[TrainingLayout, RolloutLayout]:
    """The two layouts of a plan for a cluster."""
    assert prepared.planned is not None
    return prepared.planned.found.training.layout, prepared.planned.found.rollout.layout
