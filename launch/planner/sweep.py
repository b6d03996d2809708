"""The inverse question: how many nodes does a throughput need?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.errors import UserError
from launch.planner.explain.forecast import throughput_of
from launch.planner.explain.remedies import with_nodes
from launch.planner.search.pins import check_pins
from launch.planner.search.problem import Problem
from launch.planner.search.search import Search

MOST_POINTS = 64
"""Maximum number of sizes that are planned before those around the target."""
MOST_NODES = 4096


def parse(text: str) -> tuple[int, int]:
    """`nodes=8..64` -> (8, 64).

    Raises:
        UserError: `text` has another form.
    """
    match = re.fullmatch(r"nodes=(\d+)\.\.(\d+)", text.replace(" ", ""))
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= MOST_NODES:
        raise UserError(f"{text} is not a range of cluster sizes", where="megatron-rl plan sweep",
                        fix=f"write nodes=8..64, at most {MOST_NODES} nodes")
    return int(match[1]), int(match[2])


def sweep(problem: Problem, first: int, last: int) -> list[SweepPoint]:
    """The best plan of each size from `first` to `last` nodes.

    In a wide range, about `MOST_POINTS` evenly spread sizes are planned. Then a bisection finds the smallest size that
    reaches the target. More nodes never lower the best throughput, so the bisection is exact.

    Raises:
        UserError: the pinned sizes are impossible on the largest size.
    """
    sizes, target = _Sizes(problem, last), problem.workload.target
    step = max(1, -(-(last - first) // MOST_POINTS))
    points = {nodes: sizes.point(nodes) for nodes in sorted({*range(first, last + 1, step), last})}
    if target is not None:
        reached = smallest_that_reaches(list(points.values()), target)
        high = reached.nodes if reached else first
        low = max((nodes for nodes in points if nodes < high), default=high)
        while high - low > 1:
            middle = (low + high) // 2
            points[middle] = sizes.point(middle)
            low, high = (low, middle) if reaches(points[middle], target) else (middle, high)
    return [points[nodes] for nodes in sorted(points)]


def remarks(cluster: ClusterSpec, tried: int, first: int, last: int) -> tuple[str, ...]:
    """Remarks for readers of the points."""
    sizes, have = last - first + 1, len(cluster.nodes)
    said = []
    if tried < sizes:
        said.append(f"{tried} of the {sizes} sizes from {first} to {last} were planned: evenly spread ones, and with a "
                    "target those that narrow the smallest down to one node")
    if last > have and cluster.switches:
        said.append(f"sizes beyond the {have} nodes of {cluster.name} are planned as one rail group: its switch tree "
                    "does not describe further nodes")
    return tuple(said)


class _Sizes:
    """Plans one size after another. A search reuses its results of one size for the next."""

    def __init__(self, problem: Problem, last: int) -> None:
        self.problem, self.have = problem, len(problem.cluster.nodes)
        self.largest = _searches(problem, last)
        self.known = self.largest
        """Searches for the sizes that the cluster's switch tree describes."""
        if last > self.have > 1 and problem.cluster.switches:
            self.known = _searches(problem, self.have, checked=False)

    def point(self, nodes: int) -> SweepPoint:
        largest = len(self.largest[0].problem.cluster.nodes)
        if nodes == 1 < largest:
            return self._single()
        return _point(self.known if nodes <= self.have else self.largest, nodes)

    def _single(self) -> SweepPoint:
        """One node. It is divided by GPUs, while the search of the larger sizes divides nodes."""
        try:
            return _point(_searches(self.problem, 1), 1)
        except UserError:               # the pins need a larger size
            return _none(1)


def _searches(problem: Problem, nodes: int, *, checked: bool = True) -> list[Search]:
    sized = problem.on(with_nodes(problem.cluster, nodes))
    if checked:
        check_pins(sized)
    return [Search(sized, mode) for mode in sized.modes]


def _point(searches: list[Search], nodes: int) -> SweepPoint:
    problem = searches[0].problem
    units = problem.units - (len(problem.cluster.nodes) - nodes)
    found = [best for search in searches if (best := search.best(units)) is not None]
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


@dataclass(frozen=True)
class SweepPoint:
    """The best plan of one cluster size."""

    nodes: int
    split: str
    """Printed division of the nodes, such as `20 + 12`."""
    prompts_per_hour: float | None
    """None: no plan fits this number of nodes."""
    gpu_hours: float | None
    """GPU-hours per 1,000 prompts."""
    verdict: str
    """A verdict of `Throughput`, or "no plan fits"."""


def smallest_that_reaches(points: Sequence[SweepPoint], target: float | None) -> SweepPoint | None:
    """The point with the fewest nodes whose nominal throughput is at least the target."""
    if target is None:
        return None
    return min((each for each in points if reaches(each, target)), key=lambda each: each.nodes, default=None)


def reaches(point: SweepPoint, target: float) -> bool:
    """Whether its nominal throughput is at least the target."""
    return point.prompts_per_hour is not None and point.prompts_per_hour >= target
