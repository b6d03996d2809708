"""Which nodes train and which roll out, in the switch tree. Pure.

Under one leaf switch (and in a rail-optimised unit, which counts as one) any choice is as good as any other. In a
deeper tree the ring of a DP group carries gradients and parameters, so it stays under one leaf; the tree is cut
between pipeline stages, whose edges carry least, or between the partitions, which meet once a step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launch.cluster.tree import Topology


@dataclass(frozen=True, slots=True)
class NodesByRole:
    """Nodes of each role; every node of the topology is in exactly one."""

    training: tuple[str, ...]
    """Stage by stage: the first `ring` nodes are those of the first stages, ..."""
    rollout: tuple[str, ...]
    spare: tuple[str, ...]


def choose_nodes(tree: Topology, stages: int, ring: int, rollout: int, avoid: Collection[str] = ()) -> NodesByRole:
    """Choose stages x ring nodes for training and `rollout` nodes; the rest are spares.

    Args:
        tree: the nodes; at least stages x ring + rollout of them.
        stages: groups of nodes that one DP ring spans.
        ring: nodes of each such group.
        rollout: nodes that only roll out.
        avoid: nodes to leave as spares if there are enough others.
    """
    needed = stages * ring + rollout
    free = [[node for node in leaf if node not in avoid] for leaf in tree.leaves]
    for leaf, nodes in zip(free, tree.leaves, strict=True):         # too few good ones: take of the others, in order
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
    """Training from leaf `start` on, around the end. With `whole`, a leaf takes as many rings as fit into it
    entirely; None if that leaves some without a place. Rollout goes to leaves without training first."""
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
    """Smaller is better: rings that cross leaves, leaves with both partitions, leaves of the training, switches
    between consecutive stages."""
    leaf = tree.leaf_of()
    rings = [[leaf[node] for node in training[first:first + ring]] for first in range(0, len(training), ring)]
    trains, rolls = {leaf[node] for node in training}, {leaf[node] for node in rollout}
    hops = sum(tree.distance(a, b) for here, there in zip(rings, rings[1:], strict=False)
               for a, b in zip(here, there, strict=True))
    return (sum(len(set(each)) > 1 for each in rings), len(trains & rolls), len(trains), hops)
