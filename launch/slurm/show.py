"""Parses the output of `scontrol` into records. Pure: text in, records or a `UserError` out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launch.cluster import hostlist
from launch.cluster.spec import Switch
from launch.errors import UserError

SHOW_NODES = "scontrol show node -o"
SHOW_TOPOLOGY = "scontrol show topology"
_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_]*)=")
_GPU = re.compile(r"gpu(?::(?P<type>[^:(),]+))??(?::(?P<count>\d{1,6}))?(?:\(.*\))?")
_COMMA = re.compile(r",(?![^(]*\))")
"""A comma outside parentheses: `gpu:h100:8(S:0,2),nvme:1` has two parts."""
_UP = {"IDLE", "ALLOCATED", "MIXED"}
_OUT = {"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING", "ERROR", "UNKNOWN", "FUTURE", "MAINT",
        "MAINTENANCE", "NOT_RESPONDING", "NO_RESPOND", "INVALID_REG", "INVAL", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
"""Flags of nodes that no job can get. Powered-down cloud nodes are usable, because they start on request."""


@dataclass(frozen=True)
class Node:
    """One line of `scontrol show node -o`."""

    name: str
    states: tuple[str, ...]
    """The base state, then flags: ("IDLE", "DRAIN"). A node that does not respond has NOT_RESPONDING."""
    gpus: tuple[tuple[str, int], ...]
    """(gres type or "", count) for each kind of GPU."""
    memory_bytes: int
    partitions: tuple[str, ...]
    reason: str = ""

    @property
    def unfit(self) -> str:
        """Why no job can get this node soon; "" for a node that is up, even if it runs a job."""
        bad = [state for state in self.states if state in _OUT]
        if not bad and self.states[:1] and self.states[0] in _UP:
            return ""
        return "+".join(bad or self.states or ("no state",)) + (f" ({self.reason})" if self.reason else "")


def nodes(text: str) -> tuple[Node, ...]:
    """Every node of `scontrol show node -o`, in Slurm's order.

    Raises:
        UserError: a line is not a node, or lacks a field that the planner needs.
    """
    return tuple(_node(line, number) for number, line in enumerate(text.splitlines(), 1)
                 if line.strip() and "No nodes in the system" not in line)


def topology(text: str, *, blocks: bool = False) -> tuple[Switch, ...]:
    """The switches of `scontrol show topology`; () if Slurm has no topology (topology/flat).

    Args:
        blocks: treat the blocks of topology/block as leaf switches under one switch. This shows which nodes are near to
            each other, but is not enough to predict network traffic.

    Raises:
        UserError: topology/block without `blocks`, or text that is not Slurm's output.
    """
    switches: list[Switch] = []
    leaves: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{SHOW_TOPOLOGY}, line {number}"
        fields = key_values(line)
        if blocks and ("BlockName" in fields or "AggregatedBlock" in fields):
            if name := fields.get("BlockName"):     # an aggregated block repeats the nodes of its blocks
                switches.append(Switch(name, (), _names(fields.get("Nodes"), where)))
                leaves.append(name)
            continue
        if "BlockName" in fields:
            raise UserError("this Slurm describes its network as blocks (topology/block), which have no switch tree",
                            where=where, fix="describe the cluster in a file and give it with --cluster")
        if not line.strip() or "No topology information" in line:
            continue
        if not fields.get("SwitchName"):
            raise UserError(f"not a line of Slurm's topology: {_short(line)}", where=where,
                            fix="check topology.conf, or describe the cluster in a file and give it with --cluster")
        below = _names(fields.get("Switches"), where)   # the line of a spine also lists all nodes below it
        switches.append(Switch(fields["SwitchName"], below, () if below else _names(fields.get("Nodes"), where)))
    return (*switches, *([Switch("blocks", tuple(leaves))] if len(leaves) > 1 else []))


def _node(line: str, number: int) -> Node:
    where = f"{SHOW_NODES}, line {number}"
    fields = key_values(line)
    missing = [key for key in ("NodeName", "State", "RealMemory") if not fields.get(key)]
    if missing:
        raise UserError(f"not a node as Slurm prints it, {', '.join(missing)} missing: {_short(line)}", where=where,
                        fix=f"run `{SHOW_NODES}` by hand; it should print one line per node")
    name, where = fields["NodeName"], f"{SHOW_NODES}, {fields['NodeName']}"
    if not re.fullmatch(r"\d{1,12}", fields["RealMemory"], re.ASCII):
        raise UserError(f"RealMemory={_short(fields['RealMemory'])} is not a number of MB", where=where,
                        fix="correct RealMemory in slurm.conf")
    states = [state.rstrip("*~#!%$@^-") for state in fields["State"].upper().split("+")]
    if "*" in fields["State"]:
        states.append("NOT_RESPONDING")
    partitions = tuple(part for part in fields.get("Partitions", "").split(",") if part)
    return Node(name, tuple(state for state in states if state), _gpus(fields.get("Gres", ""), where),
                int(fields["RealMemory"]) * 1024 ** 2, partitions, fields.get("Reason", ""))


def key_values(line: str) -> dict[str, str]:
    """key=value pairs of a line. Values may contain spaces and text like a pair, so a key's first value counts."""
    matches = list(_KEY.finditer(line))
    fields: dict[str, str] = {}
    for match, end in zip(matches, [*(match.start() for match in matches[1:]), len(line)], strict=False):
        fields.setdefault(match[1], line[match.end():end].strip())
    return fields


def _gpus(gres: str, where: str) -> tuple[tuple[str, int], ...]:
    """`gpu:h100:8(S:0-1),nvme:1` -> (("h100", 8),)."""
    found: dict[str, int] = {}
    for part in _COMMA.split(gres):
        if not re.match(r"gpu(?![A-Za-z0-9_])", part):
            continue
        match = _GPU.fullmatch(part)
        if match is None:
            raise UserError(f"Gres={_short(gres)}: {part!r} is not gpu:TYPE:COUNT", where=where,
                            fix="correct Gres in slurm.conf")
        kind = match["type"] or ""
        found[kind] = found.get(kind, 0) + int(match["count"] or 1)
    return tuple((kind, count) for kind, count in found.items() if count)


def _names(text: str | None, where: str) -> tuple[str, ...]:
    return hostlist.expand(text, where) if text and text != "(null)" else ()


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= 100 else text[:97] + "..."
