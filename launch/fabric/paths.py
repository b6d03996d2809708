"""A route from node to node, as trees: bytes from each node to the next, and the arrival of the last byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from launch.fabric.routes import ROOT, Route


@dataclass
class Branch:
    """Traffic into one node from the node above it, over all shards and rails. The top of a tree is a training node,
    which receives nothing."""

    node: int
    """The fabric's number of the node; training nodes come first."""
    via: Literal["nic", "nvlink"] | None
    """nvlink: copies for twins inside the node. None at the top."""
    bytes: int = 0
    seconds: float = 0.0
    """Time from the start of the transfer to the arrival of the last byte."""
    children: list[Branch] = field(default_factory=list)

    def child(self, node: int, via: Literal["nic", "nvlink"]) -> Branch:
        """The branch to a node, created if it does not exist."""
        for each in self.children:
            if (each.node, each.via) == (node, via):
                return each
        self.children.append(Branch(node, via))
        return self.children[-1]


def trees(route: Route, arrivals: Sequence[float]) -> list[Branch]:
    """One tree for each training node that sends, in order. A node that receives over two paths appears twice.

    Args:
        arrivals: arrival time of each edge in seconds, see `simulate.arrivals`.
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
