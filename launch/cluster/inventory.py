"""What a node itself says: its GPUs through NVML, its InfiniBand and RoCE ports through sysfs. No torch, no CUDA."""

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
"""How the source of a figure begins that nothing was read for."""
TOLERANCE = 0.02
"""Drivers differ by some hundred MB of 80 GB in what they keep for themselves."""


@dataclass(frozen=True)
class NodeFacts:
    """What one node has."""

    gpu_names: tuple[str, ...]
    """Product names, one a GPU, in PCI bus order."""
    gpu_bytes: tuple[int, ...]
    """What a process can use of each: total less what the driver reserves."""
    ports: tuple[tuple[str, float], ...] = ()
    """(device, Gbit/s) of each active InfiniBand or RoCE port. May hold those of the storage network."""


def read(nvml: Any = None, sysfs: Path = SYSFS) -> NodeFacts | None:
    """The facts of this machine; None where there is no NVIDIA driver (a login node).

    Args:
        nvml, sysfs: whom to ask, see `nvml.cards` and `rdma.nics`.

    Raises:
        UserError: there is a driver, and it does not answer.
    """
    found = cards(nvml)
    if not found:
        return None
    ports = tuple((nic.name, nic.gbit_per_s) for nic in nics(sysfs) if nic.state == "ACTIVE")
    return NodeFacts(tuple(card.name for card in found), tuple(card.usable_bytes for card in found), ports)


def join(spec: ClusterSpec, facts: NodeFacts, node: str, described_by: str) -> ClusterSpec:
    """The cluster, with the memory that this node's driver reports and, where the network is only assumed, the ports
    that this node has.

    Args:
        described_by: who described the cluster: `configs/clusters/x.yaml`, or `Slurm`.

    Raises:
        UserError: the node has other GPUs, or another number of them, than the description says.
    """
    here = f"NVML on {node}"
    problems: list[tuple[str, str]] = []
    if len(set(facts.gpu_names)) > 1:
        counted = ", ".join(f"{count} x {name}" for name, count in Counter(facts.gpu_names).items())
        raise UserError(f"{node} mixes kinds of GPUs: {counted}", where=here,
                        fix="plan for nodes of one kind; leave this node out")
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
                        fix=f"correct {described_by}; inside a job allocate the whole node (--exclusive), or NVML "
                            "sees only a part of it")
    joined = replace(spec, gpu=replace(spec.gpu, usable_bytes=usable),
                     sources={**spec.sources, "gpu.usable_bytes": f"{here}: total less what the driver reserves"})
    return _with_ports(joined, facts.ports, node)


def _with_ports(spec: ClusterSpec, found: tuple[tuple[str, float], ...], node: str) -> ClusterSpec:
    """The fastest ports are those of the compute network, if they share out evenly among the GPUs; whether each has a
    rail of its own no node can see, so that stays assumed."""
    fastest = max((speed for _, speed in found), default=0.0)
    count = sum(speed == fastest for _, speed in found)
    even = count and (spec.gpus_per_node % count == 0 or count % spec.gpus_per_node == 0)
    if not even or not fastest or not spec.sources.get("cluster.nics_per_node", "").startswith(ASSUMED):
        return spec
    source = f"{count} active RDMA ports of {fastest:g} Gbit/s on {node} ({SYSFS})"
    return replace(spec, nics_per_node=count, nic_bandwidth=fastest * GBIT, rails=count,
                   sources={**spec.sources, "cluster.nics_per_node": source, "cluster.nic_bandwidth": source})
