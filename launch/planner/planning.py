"""The best plan of a problem over all its modes, or the reason why there is none."""

from __future__ import annotations

from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.planner.explain.remedies import remedies
from launch.planner.search.candidate import Candidate
from launch.planner.search.problem import Problem
from launch.planner.search.search import Search

FEWER_LINKS = "use a larger rollout.tp (fewer engines share a node), or a smaller trainer.pp (fewer stages send)"


def best_of(problem: Problem) -> tuple[Search, Candidate]:
    """The fastest candidate over the requested modes, with its staging buffers, and its search.

    Raises:
        UserError: nothing fits, with exit code `NO_FEASIBLE_PLAN`. The message names the smallest changes that make a
            plan fit. Or a run could not open the weight sync, see `check_links`.
    """
    best: tuple[Search, Candidate] | None = None
    searches = [Search(problem, mode) for mode in problem.modes]
    for search in searches:
        found = search.best()
        if found is not None and (best is None or found.step_s < best[1].step_s):
            best = search, found
    if best is None:
        raise _nothing_fits(searches[0], problem)
    check_links(best[1])
    return best[0], best[1].staged()


def check_links(found: Candidate) -> None:
    """Refuse a plan with a route that a run cannot open.

    Raises:
        UserError: the route is pinned, or there is no other, with exit code `NO_FEASIBLE_PLAN`.
    """
    sync, problem = found.sync, found.problem
    if sync is None or sync.chosen in sync.usable:
        return
    counts = ", ".join(f"{kind} {sync.needs[kind].busiest}" for kind in sync.needs)
    others = " or ".join(sync.usable)
    raise UserError(f"a GPU would have {sync.needs[sync.chosen].busiest} communicators of the weight sync, and it can "
                    f"use {problem.most_links} at the same time; with each route: {counts}",
                    where=problem.origin.where("weight_sync.route"),
                    fix=f"set weight_sync.route to {others}, or to auto" if others else FEWER_LINKS,
                    exit_code=ExitCode.NO_FEASIBLE_PLAN)


def _nothing_fits(search: Search, problem: Problem) -> UserError:
    cluster = problem.cluster
    fix = "\n         ".join(f"{each.change}   ({each.prompts_per_hour:,.0f} prompts/h predicted)"
                            for each in remedies(problem))
    nodes = f"{len(cluster.nodes)} nodes x {cluster.gpus_per_node} {cluster.gpu.name}"
    return UserError(f"no plan fits {nodes}: {_why(search)}",
                     where=f"{problem.origin.path}, cluster {cluster.name}",
                     fix=fix or "no single change makes a plan fit: use a larger cluster or a smaller model",
                     exit_code=ExitCode.NO_FEASIBLE_PLAN)


def _why(search: Search) -> str:
    """The nearest miss, in numbers."""
    problem = search.problem
    most = range(1, problem.units + (search.mode != "disaggregated"))
    if not any(search.fitting(units) for units in most):
        misses = [(memory.total, memory.limit) for units in most for _, memory in search.unfit(units)]
        if misses:
            need, limit = min(misses)
            return f"training needs at least {need / 1e9:.1f} GB of {limit / 1e9:.1f} GB per GPU"
        rejected = "; ".join(f"{what}: {why}" for what, why in list(search.space.rejected.items())[:3])
        return f"no training layout divides ({rejected or 'the GPUs are not a whole number of replicas'})"
    if not any(search.rollout_options(units) for units in most):
        rooms = {each.value.split(" x ")[0]: each.rejected_by for units in most
                 for each in search.engines_without_room(units)}
        if rooms:
            tp, why = max(rooms.items(), key=lambda each: int(each[0].removeprefix("TP")))      # the nearest miss
            return f"engines of {tp}: {why}"
        reasons = [f"{what}: {why}" for what, why in search.space.rejected.items() if what.startswith("rollout")]
        return f"no engine layout divides ({'; '.join(reasons[:3]) or 'the GPUs are not a whole number of engines'})"
    if search.unroutable:
        return (f"every layout that fits has more than {problem.most_links} communicators of the weight sync on a GPU, "
                f"whatever the route: {FEWER_LINKS}")
    return "training and rollout fit separately, but not together"
