"""The inverse question: how many nodes does a rate take?"""

from __future__ import annotations

import re

from launch.errors import UserError
from launch.planner.assemble import throughput_of
from launch.planner.pins import check_pins
from launch.planner.prepare import Inputs
from launch.planner.problem import modes, problem_of
from launch.planner.remedies import with_nodes
from launch.planner.search import Search
from launch.report.plan_sweep import SweepPoint

MOST_POINTS = 64
MOST_NODES = 4096


def parse(text: str) -> tuple[int, int]:
    """`nodes=8..64` -> (8, 64).

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(r"nodes=(\d+)\.\.(\d+)", text.replace(" ", ""))
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_NODES:
        raise UserError(f"--sweep {text} is no range of cluster sizes", where="--sweep",
                        fix=f"write nodes=8..64, at most {MOST_NODES} nodes")
    return int(match[1]), int(match[2])


def sweep(inputs: Inputs, first: int, last: int) -> list[SweepPoint]:
    """The best plan of each size from `first` to `last` nodes, at most `MOST_POINTS` of them, evenly spread.

    Raises:
        UserError: pinned sizes that the largest of them cannot have.
    """
    step = max(1, -(-(last - first) // MOST_POINTS))
    largest = _searches(inputs, last)
    return [_single(inputs) if nodes == 1 < last else _point(largest, nodes)
            for nodes in sorted({*range(first, last + 1, step), last})]


def _single(inputs: Inputs) -> SweepPoint:
    """One node, which is divided by GPUs and not by nodes, as the search of the larger sizes is."""
    try:
        return _point(_searches(inputs, 1), 1)
    except UserError:               # pins that a larger size can have
        return _none(1)


def _searches(inputs: Inputs, nodes: int) -> list[Search]:
    cluster = with_nodes(inputs.cluster, nodes)
    check_pins(inputs.loaded, inputs.architecture, cluster)
    return [Search(problem_of(inputs.loaded, inputs.shape, cluster), mode) for mode in modes(inputs.loaded)]


def _point(searches: list[Search], nodes: int) -> SweepPoint:
    problem = searches[0].problem
    units = problem.units - (len(problem.cluster.nodes) - nodes)
    found = [search.with_slack(best) for search in searches if (best := search.best(units)) is not None]
    if not found:
        return _none(nodes)
    best = min(found, key=lambda candidate: candidate.step_s)
    throughput = throughput_of(best)
    gpus = nodes * problem.cluster.gpus_per_node
    rest = f"+ {best.rollout.units}" if best.mode == "disaggregated" else best.mode
    split = f"{best.training.units} {rest}" + (" GPUs" if len(problem.cluster.nodes) == 1 else "")
    return SweepPoint(nodes=nodes, split=split, prompts_per_hour=throughput.nominal,
                      gpu_hours=1000 * gpus / throughput.nominal, verdict=throughput.verdict)


def _none(nodes: int) -> SweepPoint:
    return SweepPoint(nodes=nodes, split="", prompts_per_hour=None, gpu_hours=None, verdict="no plan fits")
