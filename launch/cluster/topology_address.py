"""The switch tree from what each node of a job knows of itself: `SLURM_TOPOLOGY_ADDR` and its pattern. Pure, and no
question to the controller."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launch.cluster.spec import Switch

_DOT = re.compile(r"\.(?![^\[]*\])")
"""A dot outside brackets: `spine[1-2].leaf1.h100-001` has three parts."""
FLAT = "node"
"""The pattern of a Slurm without a topology plug-in."""


def path_of(address: str, pattern: str) -> tuple[str, ...]:
    """Switches above a node, from the top; () where Slurm knows no topology or says something else than a tree. A block
    (topology/block) is what a leaf switch is: the nodes nearest to each other.

    Args:
        address: `core.spine1.leaf1.h100-001`; a part may be a host list, where several switches serve the same below.
        pattern: `switch.switch.switch.node`, `block.node`.
    """
    parts, kinds = _DOT.split(address), pattern.split(".")
    if len(parts) != len(kinds) or kinds[-1:] != ["node"] or set(kinds[:-1]) - {"switch", "block"}:
        return ()
    return tuple(parts[:-1])


def switches_of(paths: Mapping[str, tuple[str, ...]]) -> tuple[Switch, ...]:
    """The tree over nodes with these paths; () if any node has none: half a tree would mislead."""
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
