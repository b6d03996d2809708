"""The switch tree: is it one, and what remains of it for some of the nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from launch.cluster.spec import Switch


def faults(switches: Sequence[Switch], nodes: Sequence[str]) -> list[tuple[str, str, str]]:
    """What is wrong with a switch tree over `nodes`, as (switch or "", what, remedy); [] for a sound one, or none.

    A switch may hang under several others (two spines over the same leaves); a node hangs on one leaf.
    """
    if not switches:
        return []
    found: list[tuple[str, str, str]] = []
    by_name = {switch.name: switch for switch in switches}
    for name, times in Counter(switch.name for switch in switches).items():
        if times > 1:
            found.append((name, f"switch {name} is given {times} times", "give each switch a name of its own"))
    known = set(nodes)
    for switch in switches:
        if bool(switch.nodes) == bool(switch.switches):
            found.append((switch.name, f"switch {switch.name} connects " + ("both nodes and switches" if switch.nodes
                          else "nothing"), "give it nodes (a leaf switch) or switches"))
        for below in switch.switches:
            if below not in by_name:
                found.append((switch.name, f"switch {switch.name} connects {below!r}, which is no switch here",
                              f"one of {_few(sorted(by_name))}"))
        for node in switch.nodes:
            if node not in known:
                found.append((switch.name, f"switch {switch.name} connects {node!r}, which is no node of the cluster",
                              f"one of {_few(nodes)}"))
    homes: dict[str, list[str]] = {}
    for switch in switches:
        for node, times in Counter(switch.nodes).items():
            homes.setdefault(node, []).extend([switch.name] * times)
    for node, names in homes.items():
        if len(names) > 1:
            found.append((names[1], f"node {node} hangs on {' and '.join(names)}", "leave it under one leaf switch"))
    homeless = [node for node in nodes if node not in homes]
    if homeless:
        found.append(("", f"no switch connects {_few(homeless)}", "add each to the nodes of its leaf switch"))
    return found or _shape(by_name)


def _shape(by_name: dict[str, Switch]) -> list[tuple[str, str, str]]:
    """Circles, and parts that no switch joins."""
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
        return [(name, f"switch {name} lies below itself, through {_few(sorted(left))}", "remove one of the links")]
    group = {name: name for name in by_name}

    def root(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for switch in by_name.values():
        for child in switch.switches:
            group[root(child)] = root(switch.name)
    islands = {root(name): [] for name in tops}
    for name in tops:
        islands[root(name)].append(name)
    if len(islands) > 1:
        parts = [names[0] for names in islands.values()]
        return [(parts[1], f"nothing connects {_few(parts)}", "add the switch above them, or plan for one of them")]
    return []


def restrict(switches: Sequence[Switch], nodes: Collection[str]) -> tuple[Switch, ...]:
    """The tree over some of the nodes: others left out, then switches that connect nothing any more."""
    kept = {switch.name: Switch(switch.name, switch.switches, tuple(node for node in switch.nodes if node in nodes))
            for switch in switches}
    while empty := [switch.name for switch in kept.values() if not switch.nodes and not switch.switches]:
        for name in empty:
            del kept[name]
        kept = {name: Switch(name, tuple(child for child in switch.switches if child not in empty), switch.nodes)
                for name, switch in kept.items()}
    return tuple(kept.values())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
