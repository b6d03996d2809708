"""Compares the nodes of a job: values that must be equal on all nodes, and outliers.

A single node cannot know that it differs from the others. Each comparison adds checks to the nodes that differ from the
majority. Without a majority, the disagreement is a finding of the job, not of a node.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.health.check import Check, Severity, warning

Nodes = Mapping[str, Sequence[Check]]


@dataclass(frozen=True)
class Equal:
    """The value of a check, or each entry if it is a mapping, must be the same on all nodes."""

    name: str
    severity: Severity
    remedy: str


EQUAL: tuple[Equal, ...] = (
    Equal("gpu.model", "critical", "exclude the differing nodes, or use another partition or --constraint"),
    Equal("gpu.driver", "warning", "ask for a driver update; the node is used last"),
    Equal("gpu.power_limit", "warning", "reset the power limit (`nvidia-smi -pl`); the node is slower"),
    Equal("gpu.max_clock", "warning", "reset the clocks (`nvidia-smi -rgc`); the node is slower"),
    Equal("cpu.affinity", "warning", "give every node the same number of cores: srun --cpus-per-task"),
    Equal("lib.versions", "critical", "install the same environment on every node, preferably on a shared file system"),
    Equal("env.communication", "critical", "set it to the same value on all nodes, or unset it: NCCL hangs or fails "
                                           "if it differs"),
    Equal("model.fingerprint", "critical", "copy the model folder again: this node has a different one"),
)
SLOW_FACTOR, SLOW_S = 10.0, 2.0
"""A round trip through the shared file system is an outlier above this many times the median and this many seconds."""


def disagreements(nodes: Nodes) -> tuple[dict[str, list[Check]], list[Check]]:
    """(additional checks by node, checks of the whole job for values without a majority)."""
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
    _slow_file_system(values_of(nodes, "fs.round_trip"), of_node)
    _loopback(nodes, of_node)
    return of_node, of_job


def values_of(nodes: Nodes, name: str) -> dict[str, Any]:
    """Node -> value of a check, for nodes that have one."""
    return {node: check.value for node, checks in nodes.items() for check in checks
            if check.name == name and check.value is not None}


def _parts(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Entry of a mapping -> node -> value as JSON; the entry "" for plain values. A missing entry counts as a value."""
    if not any(isinstance(value, dict) for value in values.values()):
        return {"": {node: json.dumps(value, sort_keys=True) for node, value in values.items()}}
    keys = sorted({key for value in values.values() for key in value})
    return {f" {key}": {node: json.dumps(value.get(key), sort_keys=True) for node, value in values.items()}
            for key in keys}


def _slow_file_system(round_trips_s: Mapping[str, float], into: dict[str, list[Check]]) -> None:
    if len(round_trips_s) < 3:
        return
    middle = statistics.median(round_trips_s.values())
    for node, seconds in round_trips_s.items():
        if seconds > max(SLOW_S, SLOW_FACTOR * middle):
            into.setdefault(node, []).append(warning(
                "fs.round_trip.outlier", seconds, f"fs.round_trip: {seconds:.3g} s, the median of "
                f"{len(round_trips_s)} nodes is {middle:.3g} s",
                "check the node's mount of the shared file system and its network"))


def _loopback(nodes: Nodes, into: dict[str, list[Check]]) -> None:
    """Adds a check for each address that only its own host can reach, if the job has several hosts."""
    hosts = values_of(nodes, "net.host")
    if len(set(hosts.values())) < 2:
        return
    for node, value in values_of(nodes, "net.interface").items():
        if value["loopback"]:
            into.setdefault(node, []).append(Check(
                "net.loopback", "critical", value, f"communication would use {value['name']} ({value['address']}), "
                "which other hosts cannot reach",
                "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the job's interface in the site profile"))


def _short(text: str) -> str:
    text = "not set" if text == "null" else text.strip('"')
    return text if len(text) <= 40 else text[:37] + "..."
