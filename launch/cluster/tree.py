"""Distances in the switch tree, and its leaves as groups of nodes, in an order that does not depend on how the nodes
were listed. Pure. (`launch.cluster.topology` checks that a tree is one.)"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launch.cluster.spec import Switch


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key of a node's name: n2 before n10, and two names are equal only if they are the same."""
    parts = re.split(r"([0-9]+)", name)
    key = tuple((1, int(part)) if part.isdecimal() and part.isascii() else (0, part) for part in parts)
    return (*key, (0, name))


def natural_order(names: Iterable[str]) -> list[str]:
    """Names by number where they have one."""
    return sorted(names, key=natural)


@dataclass(frozen=True)
class Topology:
    """The leaves of a switch tree over some nodes."""

    leaves: tuple[tuple[str, ...], ...]
    """Nodes of each leaf switch, both in tree order: neighbours in this list are near in the tree."""
    paths: tuple[tuple[str, ...], ...]
    """Of each leaf: the switches above it, from the top down, itself last."""

    @property
    def single(self) -> bool:
        """All nodes are one hop from each other: any choice of nodes is as good as any other."""
        return len(self.leaves) <= 1

    def leaf_of(self) -> dict[str, int]:
        """Node -> index of its leaf."""
        return {node: index for index, nodes in enumerate(self.leaves) for node in nodes}

    def distance(self, a: int, b: int) -> int:
        """Switches between nodes of leaves `a` and `b`: 1 under one leaf, 3 under one spine, ..."""
        if a == b:
            return 1
        common = 0
        for left, right in zip(self.paths[a], self.paths[b], strict=False):
            if left != right:
                break
            common += 1
        return len(self.paths[a]) + len(self.paths[b]) - 2 * common + 1


def topology(switches: Sequence[Switch], nodes: Iterable[str]) -> Topology:
    """The leaves that connect `nodes`.

    Args:
        switches: a sound tree, or (); a switch under several others (two spines over one leaf) counts under one.
        nodes: any order. Nodes that no switch of the tree connects form a leaf of their own.
    """
    wanted = set(nodes)
    by_name = {switch.name: switch for switch in switches}
    below = {child for switch in switches for child in switch.switches}
    leaves: list[tuple[str, ...]] = []
    paths: list[tuple[str, ...]] = []
    seen: set[str] = set()
    todo = [(name,) for name in reversed(natural_order(set(by_name) - below))]
    while todo:
        path = todo.pop()
        if path[-1] in seen or path[-1] not in by_name:
            continue
        seen.add(path[-1])
        switch = by_name[path[-1]]
        here = tuple(natural_order(wanted.intersection(switch.nodes)))
        if here:
            leaves.append(here)
            paths.append(path)
            wanted.difference_update(here)
        todo += [(*path, child) for child in reversed(natural_order(switch.switches))]
    if wanted:
        leaves.append(tuple(natural_order(wanted)))
        paths.append(("",))
    return Topology(tuple(leaves), tuple(paths))
