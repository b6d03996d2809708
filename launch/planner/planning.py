"""A configuration on a cluster becomes a plan: search, choose the mode, fill in what was `auto`, predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.config.checks import check
from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.model.architecture import Architecture
from launch.model.shape import ModelShape
from launch.plan.plan import Plan
from launch.planner.build import plan
from launch.planner.explain.forecast import forecast
from launch.planner.explain.remedies import remedies
from launch.planner.search.candidate import Candidate
from launch.planner.search.pins import check_pins
from launch.planner.search.problem import Problem, chosen_values, modes, problem_of
from launch.planner.search.search import Search
from launch.planner.seats.cluster import Seating, place


@dataclass(frozen=True)
class Planned:
    """A plan for a cluster, with what it was made from."""

    loaded: LoadedConfig
    """Nothing is `auto` any more."""
    plan: Plan
    seating: Seating
    found: Candidate


def plan_on_cluster(loaded: LoadedConfig, architecture: Architecture, shape: ModelShape, cluster: ClusterSpec,
                    device: Literal["cpu", "gpu"] = "gpu") -> Planned:
    """The best plan of the model, with its forecast. Pure: nothing is read but the arguments.

    Raises:
        UserError: sizes that do not go together; or, with exit code `NO_FEASIBLE_PLAN`, nothing fits: the message names
            the smallest changes that would make a plan.
    """
    check_pins(loaded, architecture, cluster)
    problem = problem_of(loaded, shape, cluster)
    search, found = best_of(problem, loaded, architecture)
    resolved = loaded.with_values(chosen_values(found, loaded.config), "planner")
    check(resolved, architecture, device)
    logical = plan(resolved.config, architecture, device)
    predicted = forecast(search, found, sources_of(resolved, cluster))
    seating = place(found.training.layout, found.rollout.layout, cluster, mode=found.mode,
                    spares=problem.spare_nodes, gpu_order=found.sync.gpu_order if found.sync else (),
                    tp_across_nodes=loaded.config.placement.tp_across_nodes)
    return Planned(resolved, logical.model_copy(update={"forecast": predicted}), seating, found)


def best_of(problem: Problem, loaded: LoadedConfig, architecture: Architecture) -> tuple[Search, Candidate]:
    """The fastest candidate over the modes asked for, and its search.

    Raises:
        UserError: nothing fits.
    """
    best: tuple[Search, Candidate] | None = None
    searches = [Search(problem, mode) for mode in modes(loaded)]
    for search in searches:
        found = search.best()
        if found is not None and (best is None or found.step_s < best[1].step_s):
            best = search, found
    if best is None:
        raise _nothing_fits(searches[0], loaded, architecture)
    return best


def sources_of(loaded: LoadedConfig, cluster: ClusterSpec) -> Mapping[str, str]:
    """Where the given numbers of the book came from, by key or a prefix of it."""
    sources = {"model": loaded.where("model.path"), "gpu": cluster.gpu.source, "workload": f"{loaded.path}, workload",
               "cluster": cluster.sources.get("cluster", loaded.config.cluster), **cluster.sources}
    for key, source in loaded.sources.items():
        if key.startswith(("trainer.", "rollout.")) and source.kind in ("file", "override"):
            sources[key] = str(source)
    return sources


def _nothing_fits(search: Search, loaded: LoadedConfig, architecture: Architecture) -> UserError:
    problem = search.problem
    changes = remedies(loaded, architecture, problem.shape, problem.cluster)
    fix = "\n         ".join(f"{each.change}   ({each.prompts_per_hour:,.0f} prompts/h predicted)" for each in changes)
    return UserError(f"no plan fits {len(problem.cluster.nodes)} nodes x {problem.cluster.gpus_per_node} "
                     f"{problem.cluster.gpu.name}: {_why(search)}", where=f"{loaded.path}, cluster {problem.cluster.name}",
                     fix=fix or "no single change makes a plan: a larger cluster or a smaller model",
                     exit_code=ExitCode.NO_FEASIBLE_PLAN)


def _why(search: Search) -> str:
    """The nearest miss, in numbers."""
    problem = search.problem
    most = range(1, problem.units + (search.mode != "disaggregated"))
    if not any(search.fitting(units) for units in most):
        misses = [(memory.total, memory.limit) for units in most for _, memory in search.unfit(units)]
        if misses:
            need, limit = min(misses)
            return f"training needs at least {need / 1e9:.1f} GB a GPU of {limit / 1e9:.1f} GB"
        reasons = "; ".join(f"{what}: {why}" for what, why in list(search.space.rejected.items())[:3])
        return f"no training layout divides ({reasons or 'the GPUs are no whole number of replicas'})"
    if not any(search.rollout_options(units) for units in most):
        rooms = {each.value.split(" x ")[0]: each.rejected_by for units in most
                 for each in search.engines_without_room(units)}
        if rooms:
            tp, why = max(rooms.items(), key=lambda each: int(each[0].removeprefix("TP")))      # the nearest miss
            return f"engines of {tp}: {why}"
        reasons = [f"{what}: {why}" for what, why in search.space.rejected.items() if what.startswith("rollout")]
        return f"no engine layout divides ({'; '.join(reasons[:3]) or 'the GPUs are no whole number of engines'})"
    return "training and rollout each fit alone, not together"
