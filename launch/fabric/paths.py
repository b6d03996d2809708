"""A route from node to node, as trees: which node passes how many bytes on to which, and when the last one arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from launch.fabric.routes import ROOT, Route


@dataclass
class Branch:
    """What one node gets from the one above it, all shards and rails together. At the top of a tree: a training node,
    which gets nothing."""

    node: int
    """As the fabric numbers them: training nodes first."""
    via: Literal["nic", "nvlink"] | None
    """nvlink: copies for twins inside the node; None at the top."""
    bytes: int = 0
    seconds: float = 0.0
    """After the transfer's start, the last byte has arrived."""
    children: list[Branch] = field(default_factory=list)

    def child(self, node: int, via: Literal["nic", "nvlink"]) -> Branch:
        """The branch to a node, made where there is none yet."""
        for each in self.children:
            if (each.node, each.via) == (node, via):
                return each
        self.children.append(Branch(node, via))
        return self.children[-1]


def trees(route: Route, arrivals: Sequence[float]) -> list[Branch]:
    """One tree for each training node that sends, in order. A node that takes bytes on two ways stands in two places.

    Args:
        arrivals: seconds of each edge, see `simulate.arrivals`.
    """
    roots: dict[int, Branch] = {}
    reached: list[Branch] = []
    for edge, seconds in zip(route.edges, arrivals, strict=True):
        above = reached[edge.parent] if edge.parent != ROOT else \
            roots.setdefault(edge.source.node, Branch(edge.source.node, None))
        branch = above.child(edge.destination.node, edge.via)
        branch.bytes += edge.bytes
        branch.seconds = max(branch.seconds, seconds)
        reached.append(branch)
    return [roots[node] for node in sorted(roots)]
