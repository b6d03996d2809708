"""The hardware of this node: GPUs from NVML, InfiniBand and RoCE ports from sysfs. Needs neither torch nor CUDA."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.cluster import gpus
from launch.cluster.file import GBIT
from launch.cluster.nvml import cards
from launch.cluster.rdma import SYSFS, nics
from launch.cluster.spec import ClusterSpec
from launch.errors import UserError

ASSUMED = "assumed"
"""Prefix of the source of a figure that was not read from anywhere."""
TOLERANCE = 0.02
"""The memory that drivers reserve differs by some hundred MB of 80 GB."""


@dataclass(frozen=True)
class NodeFacts:
    """The hardware of one node."""

    gpu_names: tuple[str, ...]
    """Product names, one per GPU, in PCI bus order."""
    gpu_bytes: tuple[int, ...]
    """Bytes of each GPU that a process can use: total minus the driver's reserve."""
    ports: tuple[tuple[str, float], ...] = ()
    """(device, Gbit/s) of each active InfiniBand or RoCE port. May include ports of the storage network."""


def read(nvml: Any = None, sysfs: Path = SYSFS) -> NodeFacts | None:
    """The hardware of this machine; None without an NVIDIA driver (a login node).

    Args:
        nvml, sysfs: the sources, see `nvml.cards` and `rdma.nics`.

    Raises:
        UserError: the driver is installed but does not answer.
    """
    found = cards(nvml)
    if not found:
        return None
    ports = tuple((nic.name, nic.gbit_per_s) for nic in nics(sysfs) if nic.state == "ACTIVE")
    return NodeFacts(tuple(card.name for card in found), tuple(card.usable_bytes for card in found), ports)


def join(spec: ClusterSpec, facts: NodeFacts, node: str, described_by: str) -> ClusterSpec:
    """The cluster with the GPU memory that this node's driver reports and, if the network is only assumed, the ports
    of this node.

    Args:
        described_by: source of the cluster description: `configs/clusters/x.yaml`, or `Slurm`.

    Raises:
        UserError: the node's GPUs differ from the description in kind, memory or number.
    """
    here = f"NVML on {node}"
    problems: list[tuple[str, str]] = []
    if len(set(facts.gpu_names)) > 1:
        counted = ", ".join(f"{count} x {name}" for name, count in Counter(facts.gpu_names).items())
        raise UserError(f"{node} mixes kinds of GPUs: {counted}", where=here,
                        fix="plan for nodes with one kind of GPU, and exclude this node")
    kind = gpus.find(facts.gpu_names[0], here, memory_bytes=min(facts.gpu_bytes))
    usable = min(facts.gpu_bytes)
    if kind.name != spec.gpu.name:
        problems.append((f"the GPUs are {facts.gpu_names[0]} ({kind.name}), not {spec.gpu.name}", "gpus.kind"))
    elif abs(usable - spec.gpu.usable_bytes) > TOLERANCE * spec.gpu.usable_bytes:
        problems.append((f"a GPU offers {usable / 1e9:.1f} GB, not {spec.gpu.usable_bytes / 1e9:.1f}",
                         "gpus.memory_gb"))
    if len(facts.gpu_names) != spec.gpus_per_node:
        problems.append((f"there are {len(facts.gpu_names)} GPUs, not {spec.gpus_per_node}", "gpus.per_node"))
    if problems:
        keys = ", ".join(key for _, key in problems)
        raise UserError(f"{described_by} and {node} disagree: on {node} " + "; ".join(what for what, _ in problems),
                        where=f"{described_by} ({keys}) against {here}",
                        fix=f"correct {described_by}; inside a job, allocate the whole node (--exclusive), because "
                            "NVML sees only the allocated GPUs")
    joined = replace(spec, gpu=replace(spec.gpu, usable_bytes=usable),
                     sources={**spec.sources, "gpu.usable_bytes": f"{here}: total minus the driver's reserve"})
    return _with_ports(joined, facts.ports, node)


def _with_ports(spec: ClusterSpec, found: tuple[tuple[str, float], ...], node: str) -> ClusterSpec:
    """The fastest ports belong to the compute network if they divide evenly among the GPUs. A node cannot see whether
    each port has its own rail, so that stays assumed."""
    fastest = max((speed for _, speed in found), default=0.0)
    count = sum(speed == fastest for _, speed in found)
    even = count and (spec.gpus_per_node % count == 0 or count % spec.gpus_per_node == 0)
    if not even or not fastest or not spec.sources.get("cluster.nics_per_node", "").startswith(ASSUMED):
        return spec
    source = f"{count} active RDMA ports of {fastest:g} Gbit/s on {node} ({SYSFS})"
    return replace(spec, nics_per_node=count, nic_bandwidth=fastest * GBIT, rails=count,
                   sources={**spec.sources, "cluster.nics_per_node": source, "cluster.nic_bandwidth": source})
