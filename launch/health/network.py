"""The network tier (`--tier fabric`): an all-reduce over all members, and the bandwidth of every pair of nodes compared
with the plan.

The measurement needs torch and is a separate program (`megatron_rl.network_check`): one process per member, started by
the node's supervisor. This module holds its task, its result and the judgement.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from launch import envvars
from launch.cluster.spec import ClusterSpec
from launch.files.shared import read_shared, write_atomically
from launch.health.check import Check, critical, ok, warning

FOLDER, TASK, RESULT = "fabric", "task.json", "result.json"
SCHEMA_VERSION = 1
MIB = 1024 ** 2
SICK_SHARE, SLOW_SHARE = 0.5, 0.75
"""Fractions of the expected bandwidth. Below the first a node is excluded, below the second it is used last.
Point-to-point, nccl-tests reaches 90 to 95 % of a NIC's line rate."""


@dataclass(frozen=True)
class Member:
    """One process of the measurement."""

    node: str
    gpu: int | None
    """Local index; None on a CPU."""
    address: str


@dataclass(frozen=True)
class Task:
    """The measurement to make. Members of a node are consecutive, equally many on each node, and in rail order."""

    members: tuple[Member, ...]
    backend: Literal["gloo", "nccl"]
    port: int
    """Port of the store, on the first member's node."""
    nics: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Node -> NICs for NCCL by name, see `launch.health.rails.for_nccl`."""
    allreduce_bytes: int = 256 * MIB
    pair_bytes: int = 64 * MIB
    repeats: int = 5
    timeout_s: float = 180.0

    def write(self, attempt_folder: Path) -> None:
        folder = attempt_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TASK, json.dumps(asdict(self), indent=1), durable=True)

    @staticmethod
    def read(attempt_folder: Path) -> Task | None:
        """None while it is not there."""
        return read_shared(attempt_folder / FOLDER / TASK, _TASK.validate_json)


@dataclass(frozen=True)
class Pair:
    """Two nodes that exchange data in both directions. All members take part, each with its peer on the same rail."""

    nodes: tuple[str, str]
    bytes_per_s: float
    """Rate of the pair's slowest member in one direction."""


@dataclass(frozen=True)
class Result:
    """The result of the measurement."""

    allreduce_bytes: int
    allreduce_s: float
    """Seconds of the slowest member, best of the repeats."""
    pairs: tuple[Pair, ...] = ()
    wrong: dict[str, str] = field(default_factory=dict)
    """Node -> data that arrived corrupted."""
    errors: dict[str, str] = field(default_factory=dict)
    """Node -> why it could not take part. If not empty, nothing was measured."""
    members: int = 0

    @property
    def bus_bytes_per_s(self) -> float:
        """Bandwidth of the all-reduce as nccl-tests counts it (doc/PERFORMANCE.md): 2 (n - 1)/n x bytes / seconds."""
        share = 2 * (self.members - 1) / self.members if self.members else 0.0
        return share * self.allreduce_bytes / self.allreduce_s if self.allreduce_s else 0.0

    def write(self, attempt_folder: Path) -> None:
        write_atomically(attempt_folder / FOLDER / RESULT,
                         json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1), durable=True)

    @staticmethod
    def read(attempt_folder: Path) -> Result | None:
        """None while it is not there."""
        return read_shared(attempt_folder / FOLDER / RESULT, _RESULT.validate_json)


_TASK, _RESULT = TypeAdapter(Task), TypeAdapter(Result)


def command(attempt_folder: Path, rank: int) -> list[str]:
    """The command of member `rank`. The supervisor sets `variables` before Python starts."""
    return [sys.executable, "-m", "megatron_rl.network_check", str(attempt_folder), str(rank)]


def variables(task: Task, member: Member, interface: str, mark: str) -> dict[str, str]:
    """Variables of the member's process in addition to the inherited ones: the same as for a training rank."""
    gpus = () if member.gpu is None else (member.gpu,)
    return {**envvars.environment("trainer", "gpu" if gpus else "cpu", None, job=mark,
                                  gpus=gpus, interface=interface, address=member.address,
                                  nics=task.nics.get(member.node, ())),
            envvars.NODE: member.node}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` once, in rounds of disjoint pairs, by the circle method of round-robin tournaments. With an
    odd count, one rests in each round."""
    seats = list(range(count)) + ([-1] if count % 2 else [])
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if -1 not in (a, b)])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def expected_bytes_per_s(cluster: ClusterSpec) -> float:
    """Network line rate of one GPU in bytes/s: its share of the node's NICs."""
    return cluster.nic_bandwidth * cluster.nics_per_node / cluster.gpus_per_node


def judge_network(result: Result, nodes: Sequence[str], expected: float | None = None) -> dict[str, list[Check]]:
    """Checks by node, to be judged with the other checks.

    A node is as fast as its best pair. If its best pair is slow, the node is slow. If only some of its pairs are slow,
    the path between the two nodes is reported and neither is blamed.

    Args:
        nodes: all nodes that took part.
        expected: bytes/s of a member in one direction, from the plan's cluster. None: nodes are compared with their
            median, and a slow node is a warning.
    """
    checks: dict[str, list[Check]] = {node: [] for node in nodes}
    for node, error in result.errors.items():
        checks[node].append(critical("fabric.joined", None, error, "see the logs in fabric/; NCCL_DEBUG=INFO shows "
                                     "which device and interface NCCL uses"))
    for node, damage in result.wrong.items():
        checks[node].append(critical("fabric.data", None, damage, "memory or a link corrupts data: drain the node"))
    if result.errors:
        return checks
    bus = result.bus_bytes_per_s
    for node in nodes:
        checks[node].append(ok("fabric.allreduce", bus, f"{result.members} members, "
                               f"{result.allreduce_bytes / MIB:.0f} MiB: bus bandwidth {_rate(bus)}"))
    if not result.pairs:
        return checks
    best = {node: max((pair.bytes_per_s for pair in result.pairs if node in pair.nodes), default=0.0)
            for node in nodes}
    measure = expected or statistics.median(best.values())
    for node, speed in best.items():
        checks[node].append(_speed(speed, measure, planned=expected is not None))
    for pair in result.pairs:
        own = min(best[node] for node in pair.nodes)
        if pair.bytes_per_s < SICK_SHARE * own:
            first, second = pair.nodes
            checks[first].append(warning(
                "fabric.path", pair.bytes_per_s, f"{_rate(pair.bytes_per_s)} to {second}, while both reach "
                f"{_rate(own)} with others", "check the fabric's counters for a link or switch between the two"))
    return checks


def _speed(speed: float, measure: float, *, planned: bool) -> Check:
    told = (f"{_rate(speed)} with its best partner, {'the plan expects' if planned else 'the median is'} "
            f"{_rate(measure)}")
    remedy = "check the node's cables and its NICs' counters, and PCIe (ACS, GPUDirect RDMA)"
    if planned and speed < SICK_SHARE * measure:
        return critical("fabric.bandwidth", speed, told, remedy)
    if speed < SLOW_SHARE * measure:
        return warning("fabric.bandwidth", speed, told, remedy)
    return ok("fabric.bandwidth", speed, told)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
