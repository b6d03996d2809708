"""Comparisons across the nodes of a job: what must be equal everywhere, and who is an outlier.

A node on its own cannot know that it is the odd one: every comparison yields further checks for the nodes that differ
from the majority. Without a majority nobody is the odd one, and the disagreement is the job's.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.health.check import Check, Severity

Nodes = Mapping[str, Sequence[Check]]


@dataclass(frozen=True)
class Equal:
    """A check's value, or each entry of it if it is a mapping, must be the same on all nodes."""

    name: str
    severity: Severity
    remedy: str


@dataclass(frozen=True)
class Outlier:
    """A check's number may not lie beyond `factor` times the median, nor matter below `floor`."""

    name: str
    factor: float
    floor: float
    unit: str
    remedy: str


EQUAL: tuple[Equal, ...] = (
    Equal("gpu.model", "critical", "leave the odd nodes out, or use another partition or --constraint"),
    Equal("gpu.driver", "warning", "have the driver updated; such a node is used last"),
    Equal("gpu.power_limit", "warning", "reset the power limit (`nvidia-smi -pl`); such a node is slower"),
    Equal("gpu.max_clock", "warning", "reset the clocks (`nvidia-smi -rgc`); such a node is slower"),
    Equal("cpu.affinity", "warning", "give every node the same cores: srun --cpus-per-task"),
    Equal("lib.versions", "critical", "install the same environment on every node, best on a shared file system"),
    Equal("env.communication", "critical", "set it equally on all nodes, or nowhere: NCCL hangs or fails where it "
                                           "differs"),
    Equal("model.fingerprint", "critical", "copy the model folder again: this node holds another one"),
)
OUTLIERS: tuple[Outlier, ...] = (
    Outlier("fs.round_trip", 10.0, 2.0, "s", "check the node's mount of the shared file system and its network"),
)


def disagreements(nodes: Nodes) -> tuple[dict[str, list[Check]], list[Check]]:
    """(further checks by node, checks of the whole job where no majority exists)."""
    of_node: dict[str, list[Check]] = {}
    of_job: list[Check] = []
    for rule in EQUAL:
        for part, values in _parts(values_of(nodes, rule.name)).items():
            name = f"{rule.name}.differs"
            label = f"{rule.name}{part}"
            counts = Counter(values.values())
            if len(counts) < 2:
                continue
            (common, most), (_, second) = counts.most_common(2)
            told = ", ".join(f"{_short(value)} on {count}" for value, count in counts.most_common(3))
            if most == second:
                of_job.append(Check(name, rule.severity, sorted(counts), f"{label}: the nodes disagree without a "
                                    f"majority: {told}", rule.remedy))
                continue
            for node, value in values.items():
                if value != common:
                    of_node.setdefault(node, []).append(Check(
                        name, rule.severity, json.loads(value), f"{label} is {_short(value)}, on {most} of "
                        f"{len(values)} nodes {_short(common)}", rule.remedy))
    for outlier in OUTLIERS:
        _outliers(outlier, values_of(nodes, outlier.name), of_node)
    _loopback(nodes, of_node)
    return of_node, of_job


def values_of(nodes: Nodes, name: str) -> dict[str, Any]:
    """node -> value of a check, where it has one."""
    return {node: check.value for node, checks in nodes.items() for check in checks
            if check.name == name and check.value is not None}


def _parts(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Entry of a mapping -> node -> value as JSON; one entry "" for plain values. An absent entry is a value too."""
    if not any(isinstance(value, dict) for value in values.values()):
        return {"": {node: json.dumps(value, sort_keys=True) for node, value in values.items()}}
    keys = sorted({key for value in values.values() for key in value})
    return {f" {key}": {node: json.dumps(value.get(key), sort_keys=True) for node, value in values.items()}
            for key in keys}


def _outliers(rule: Outlier, values: Mapping[str, float], into: dict[str, list[Check]]) -> None:
    if len(values) < 3:
        return
    middle = statistics.median(values.values())
    for node, value in values.items():
        if value > max(rule.floor, rule.factor * middle):
            into.setdefault(node, []).append(Check(
                f"{rule.name}.outlier", "warning", value, f"{rule.name}: {value:.3g} {rule.unit}, the median of "
                f"{len(values)} nodes is {middle:.3g} {rule.unit}", rule.remedy))


def _loopback(nodes: Nodes, into: dict[str, list[Check]]) -> None:
    """An address that only its own host can reach, in a job of several hosts."""
    hosts = values_of(nodes, "net.host")
    if len(set(hosts.values())) < 2:
        return
    for node, value in values_of(nodes, "net.interface").items():
        if value["loopback"]:
            into.setdefault(node, []).append(Check(
                "net.loopback", "critical", value, f"communication would use {value['name']} ({value['address']}), "
                "which other hosts cannot reach",
                "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the job's network in the site profile"))


def _short(text: str) -> str:
    text = "not set" if text == "null" else text.strip('"')
    return text if len(text) <= 40 else text[:37] + "..."
