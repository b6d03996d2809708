"""The switch tree: its validation, its restriction to some nodes, distances, and its leaves as groups of nodes, in an
order that does not depend on the order of the node list. Pure."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launch.cluster.spec import Switch
from launch.files.waiting import listed

_DOT = re.compile(r"\.(?![^\[]*\])")
"""A dot outside brackets: `spine[1-2].leaf1.h100-001` has three parts."""
FLAT = "node"
"""The address pattern of a Slurm without a topology plug-in."""


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key of a node name: n2 sorts before n10. Different names have different keys."""
    parts = re.split(r"([0-9]+)", name)
    key = tuple((1, int(part)) if part.isdecimal() and part.isascii() else (0, part) for part in parts)
    return (*key, (0, name))


def natural_order(names: Iterable[str]) -> list[str]:
    """Names in natural order: by number if they contain one."""
    return sorted(names, key=natural)


@dataclass(frozen=True)
class Topology:
    """The leaves of a switch tree over some nodes."""

    leaves: tuple[tuple[str, ...], ...]
    """Nodes of each leaf switch. Both are in tree order: neighbours in this list are near in the tree."""
    paths: tuple[tuple[str, ...], ...]
    """For each leaf, the switches above it from the top down, and the leaf last."""

    def leaf_of(self) -> dict[str, int]:
        """Node -> index of its leaf."""
        return {node: index for index, nodes in enumerate(self.leaves) for node in nodes}

    def distance(self, a: int, b: int) -> int:
        """Number of switches between nodes of leaves `a` and `b`: 1 in one leaf, 3 under one spine, ..."""
        if a == b:
            return 1
        return len(self.paths[a]) + len(self.paths[b]) - 2 * common(self.paths[a], self.paths[b]) + 1


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of entries that two paths share, from the top."""
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def topology(switches: Sequence[Switch], nodes: Iterable[str]) -> Topology:
    """The leaves that connect `nodes`.

    Args:
        switches: a valid tree, or (). A switch under several others (two spines over one leaf) counts under one.
        nodes: in any order. Nodes that no switch of the tree connects form a separate leaf.
    """
    wanted = set(nodes)
    by_name = {switch.name: switch for switch in switches}
    below = {child for switch in switches for child in switch.switches}
    leaves: list[tuple[str, ...]] = []
    paths: list[tuple[str, ...]] = []
    seen: set[str] = set()
    todo: list[tuple[str, ...]] = [(name,) for name in reversed(natural_order(set(by_name) - below))]
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


def faults(switches: Sequence[Switch], nodes: Sequence[str]) -> list[tuple[str, str, str]]:
    """Problems of a switch tree over `nodes`, as (switch or "", what, remedy); [] if it is valid or empty.

    A switch may be under several others (two spines over the same leaves). A node is under exactly one leaf.
    """
    if not switches:
        return []
    found: list[tuple[str, str, str]] = []
    by_name = {switch.name: switch for switch in switches}
    for name, times in Counter(switch.name for switch in switches).items():
        if times > 1:
            found.append((name, f"switch {name} is defined {times} times", "give each switch a unique name"))
    known = set(nodes)
    for switch in switches:
        if bool(switch.nodes) == bool(switch.switches):
            found.append((switch.name, f"switch {switch.name} connects " + ("both nodes and switches" if switch.nodes
                          else "nothing"), "give it nodes (a leaf switch) or switches"))
        for below in switch.switches:
            if below not in by_name:
                found.append((switch.name, f"switch {switch.name} connects {below!r}, which is not a switch",
                              f"use one of {listed(sorted(by_name), 6)}"))
        for node in switch.nodes:
            if node not in known:
                found.append((switch.name, f"switch {switch.name} connects {node!r}, which is not a node",
                              f"use one of {listed(nodes, 6)}"))
    homes: dict[str, list[str]] = {}
    for switch in switches:
        for node, times in Counter(switch.nodes).items():
            homes.setdefault(node, []).extend([switch.name] * times)
    for node, names in homes.items():
        if len(names) > 1:
            found.append((names[1], f"node {node} is under {' and '.join(names)}", "keep it under one leaf switch"))
    homeless = [node for node in nodes if node not in homes]
    if homeless:
        found.append(("", f"no switch connects {listed(homeless, 6)}", "add each to the nodes of its leaf switch"))
    return found or _shape(by_name)


def _shape(by_name: dict[str, Switch]) -> list[tuple[str, str, str]]:
    """Cycles and disconnected parts."""
    below = {child for switch in by_name.values() for child in switch.switches}
    tops = [name for name in by_name if name not in below]
    left = {name: set(switch.switches) for name, switch in by_name.items()}
    while ready := [name for name, children in left.items() if not children]:   # from the leaves up
        for name in ready:
            del left[name]
        for children in left.values():
            children.difference_update(ready)
    if left:
        name = sorted(left)[0]
        return [(name, f"switch {name} is below itself, through {listed(sorted(left), 6)}", "remove one of the links")]
    group = {name: name for name in by_name}

    def root(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for switch in by_name.values():
        for child in switch.switches:
            group[root(child)] = root(switch.name)
    islands: dict[str, list[str]] = {root(name): [] for name in tops}
    for name in tops:
        islands[root(name)].append(name)
    if len(islands) > 1:
        parts = [names[0] for names in islands.values()]
        return [(parts[1], f"nothing connects {listed(parts, 6)}",
                 "add the switch above them, or plan for one of them")]
    return []


def restrict(switches: Sequence[Switch], nodes: Collection[str]) -> tuple[Switch, ...]:
    """The tree over some of the nodes, without the other nodes and without switches that then connect nothing."""
    kept = {switch.name: Switch(switch.name, switch.switches, tuple(node for node in switch.nodes if node in nodes))
            for switch in switches}
    while empty := [switch.name for switch in kept.values() if not switch.nodes and not switch.switches]:
        for name in empty:
            del kept[name]
        kept = {name: Switch(name, tuple(child for child in switch.switches if child not in empty), switch.nodes)
                for name, switch in kept.items()}
    return tuple(kept.values())


def path_of(address: str, pattern: str) -> tuple[str, ...]:
    """Switches above a node, from the top; () if Slurm has no topology or one that is not a tree. A block
    (topology/block) is treated as a leaf switch: it holds the nodes nearest to each other.

    Args:
        address: `core.spine1.leaf1.h100-001`. A part is a host list if several switches serve the same lower level.
        pattern: `switch.switch.switch.node` or `block.node`.
    """
    parts, kinds = _DOT.split(address), pattern.split(".")
    if len(parts) != len(kinds) or kinds[-1:] != ["node"] or set(kinds[:-1]) - {"switch", "block"}:
        return ()
    return tuple(parts[:-1])


def switches_of(paths: Mapping[str, tuple[str, ...]]) -> tuple[Switch, ...]:
    """The tree over nodes with these paths; () if any node has none, because a partial tree would mislead."""
    if not paths or not all(paths.values()):
        return ()
    below: dict[str, dict[str, None]] = {}
    leaves: dict[str, list[str]] = {}
    for node, path in paths.items():
        leaves.setdefault(path[-1], []).append(node)
        for upper, lower in zip(path, path[1:], strict=False):
            below.setdefault(upper, {})[lower] = None
    tree = [Switch(name, tuple(children)) for name, children in below.items() if name not in leaves]
    return (*tree, *(Switch(name, (), tuple(nodes)) for name, nodes in leaves.items()))
