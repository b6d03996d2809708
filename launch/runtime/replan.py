"""Reduces a plan to fewer nodes. Engines are removed first, because that only makes a step longer; then data-parallel
replicas. Model-parallel sizes, the batch and everything else stay the same. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.plan.layouts import TrainingLayout
from launch.planner.explain.forecast import forecast
from launch.planner.from_config import plan_of, problem_of
from launch.planner.here import pinned_candidate
from launch.planner.prepare import OnCluster
from launch.planner.seats.cluster import nodes_needed


@dataclass(frozen=True)
class SmallerSizes:
    """The sizes that a smaller plan changes."""

    dp: int
    replicas: int
    training_nodes: int
    nodes: int
    """Number of all nodes that it needs."""

    def __str__(self) -> str:
        return f"{self.replicas} engine(s), trainer.dp {self.dp}, {self.nodes} node(s)"


def sizes_for(nodes: int, planned: OnCluster) -> SmallerSizes | None:
    """The largest sizes that fit: all data-parallel replicas and as many engines as possible. If not even one engine
    fits, the next smaller divisor of DP is tried. None if nothing fits."""
    return next((sizes for sizes in _candidates(planned) if sizes.nodes <= nodes), None)


def for_fewer(nodes: int, planned: OnCluster, min_nodes: int | None) -> tuple[OnCluster, SmallerSizes]:
    """The plan for `nodes` nodes.

    Args:
        planned: the plan that needs more nodes.
        min_nodes: `run.min_nodes`; None: as many as planned.

    Raises:
        UserError: there are fewer nodes than `min_nodes`, or nothing fits; exit code PREFLIGHT.
    """
    if min_nodes is None or nodes < min_nodes:
        least = f"run.min_nodes = {min_nodes}" if min_nodes is not None else "run.min_nodes is not set"
        whole = next(_candidates(planned))
        raise UserError(f"{nodes} fit node(s), the plan needs {whole.nodes}, and {least}", where="run.min_nodes",
                        fix=f"set run.min_nodes to at most {nodes} to continue with a smaller plan, or add spare nodes",
                        exit_code=ExitCode.PREFLIGHT)
    sizes = sizes_for(nodes, planned)
    if sizes is None:
        raise UserError(f"the plan cannot be reduced to {nodes} fit node(s): one data-parallel replica and one engine "
                        "need more",
                        where="trainer.tp, trainer.pp, rollout.tp", fix="plan for fewer nodes, or provide more",
                        exit_code=ExitCode.PREFLIGHT)
    return _smaller(sizes, planned), sizes


def _candidates(planned: OnCluster) -> Iterator[SmallerSizes]:
    """All sizes in descending order, starting with the plan itself."""
    found, cluster = planned.found, planned.cluster
    training, rollout = found.training.layout, found.rollout.layout
    for dp in (dp for dp in range(training.dp, 0, -1) if training.dp % dp == 0):
        fewer = replace(training, dp=dp)
        alone = nodes_needed(fewer, replace(rollout, replicas=0), cluster, found.mode)
        for replicas in range(rollout.replicas, 0, -1):
            needed = (_cpu_nodes(planned, fewer, replicas) if cluster.gpu.device == "cpu" else
                      (alone, nodes_needed(fewer, replace(rollout, replicas=replicas), cluster, found.mode)))
            yield SmallerSizes(dp, replicas, *needed)


def _cpu_nodes(planned: OnCluster, training: TrainingLayout, replicas: int) -> tuple[int, int]:
    """(training nodes, all nodes) with as many processes per node as planned, as in
    `launch.planner.seats.local.place_cpu`."""
    split = planned.plan.forecast.split
    whole, engines = planned.found.training.layout, planned.found.rollout.layout.replicas
    train = max(1, split.training * training.dp // whole.dp)
    a_node = -(-engines // max(1, split.rollout))
    return train, train + -(-replicas // a_node)


def _smaller(sizes: SmallerSizes, planned: OnCluster) -> OnCluster:
    """The plan with these sizes and its forecast. It needs no check: if a plan is valid, so is one with fewer
    engines and replicas."""
    chosen = {**planned.plan.chosen, "trainer.dp": sizes.dp, "rollout.replicas": sizes.replicas,
              "placement.training_nodes": sizes.training_nodes}
    resolved = planned.loaded.resolved(chosen)
    teacher = planned.found.problem.teacher
    plan = plan_of(resolved.config, planned.plan.architecture, planned.plan.device, chosen, teacher)
    problem = problem_of(resolved, planned.found.problem.shape, planned.cluster, teacher)
    found = pinned_candidate(problem, plan, planned.found.mode)
    return replace(planned, config=resolved.config, found=found, needed=sizes.nodes,
                   plan=plan.predicted(forecast(None, found, problem.sources(chosen))))
