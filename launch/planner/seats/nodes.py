"""Chooses the nodes that train and those that roll out, in the switch tree. Pure.

Under one leaf switch all choices are equally good. A rail-optimised unit counts as one leaf. In a deeper tree, the ring
of a DP group stays under one leaf, because it carries gradients and parameters. The tree is cut between pipeline
stages, where traffic is smallest, or between the partitions, which communicate once per step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launch.cluster.tree import Topology


@dataclass(frozen=True, slots=True)
class NodesByRole:
    """The nodes of each role. Every node of the topology has exactly one role."""

    training: tuple[str, ...]
    """Nodes in the order of stages: the first `ring` nodes belong to the first stages, ..."""
    rollout: tuple[str, ...]
    spare: tuple[str, ...]


def choose_nodes(tree: Topology, stages: int, ring: int, rollout: int, avoid: Collection[str] = ()) -> NodesByRole:
    """Choose stages x ring nodes for training and `rollout` nodes; the rest are spares.

    Args:
        tree: the nodes; at least stages x ring + rollout.
        stages: number of groups of nodes, each of which a DP ring spans.
        ring: nodes of each group.
        rollout: number of nodes that only roll out.
        avoid: nodes that become spares if there are enough others.
    """
    needed = stages * ring + rollout
    free = [[node for node in leaf if node not in avoid] for leaf in tree.leaves]
    for leaf, nodes in zip(free, tree.leaves, strict=True):         # too few good nodes: add others, in order
        short = needed - sum(map(len, free))
        if short > 0:
            leaf += [node for node in nodes if node in avoid][:short]
    starts = range(len(free)) if len(free) > 1 else (0,)
    candidates = [found for start in starts for whole in (True, False)
                  if (found := _fill(free, start, whole, stages, ring, rollout)) is not None]
    training, chosen = min(candidates, key=lambda each: _cost(tree, ring, *each))
    used = {*training, *chosen}
    return NodesByRole(tuple(training), tuple(chosen),
                       tuple(node for leaf in tree.leaves for node in leaf if node not in used))


def _fill(leaves: Sequence[Sequence[str]], start: int, whole: bool, stages: int, ring: int,
          rollout: int) -> tuple[list[str], list[str]] | None:
    """Fill leaves with training from leaf `start` on, cyclically; then fill with rollout, leaves without training
    first. With `whole`, a leaf gets only whole rings. None if some nodes find no place."""
    order = [*range(start, len(leaves)), *range(start)]
    training: list[str] = []
    left: dict[int, list[str]] = {}
    for index in order:
        nodes, missing = list(leaves[index]), stages * ring - len(training)
        take = min(missing, len(nodes) // ring * ring if whole else len(nodes))
        training += nodes[:take]
        left[index] = nodes[take:]
    if len(training) < stages * ring:
        return None
    touched = [index for index in order if len(left[index]) < len(leaves[index])]
    rest = [node for index in order if index not in touched for node in left[index]]
    rest += [node for index in reversed(touched) for node in left[index]]
    return (training, rest[:rollout]) if len(rest) >= rollout else None


def _cost(tree: Topology, ring: int, training: Sequence[str], rollout: Sequence[str]) -> tuple[int, ...]:
    """Cost of a choice, smaller is better: rings that cross leaves, leaves with both partitions, leaves with training,
    switches between consecutive stages."""
    leaf = tree.leaf_of()
    rings = [[leaf[node] for node in training[first:first + ring]] for first in range(0, len(training), ring)]
    trains, rolls = {leaf[node] for node in training}, {leaf[node] for node in rollout}
    hops = sum(tree.distance(a, b) for here, there in zip(rings, rings[1:], strict=False)
               for a, b in zip(here, there, strict=True))
    return (sum(len(set(each)) > 1 for each in rings), len(trains & rolls), len(trains), hops)
