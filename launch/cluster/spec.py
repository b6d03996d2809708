"""A cluster as the planner sees it. `file` reads it from YAML, `slurm` from a live Slurm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, with figures from its datasheet (see `gpus`). A CPU core counts as one too: local runs put a rank
    on each core, and the formulas are the same."""

    name: str
    """H100-SXM-80GB, ..."""
    bf16_flops: float
    """Dense FLOP/s."""
    fp8_flops: float
    """Dense FLOP/s; equal to bf16_flops if the chip has no FP8."""
    hbm_bytes: int
    """Nominal memory: 80 GB is 80e9."""
    usable_bytes: int
    """The total that CUDA reports, which excludes the driver's reserve."""
    hbm_bandwidth: float
    """bytes/s."""
    nvlink_bandwidth: float
    """bytes/s of all links in one direction."""
    source: str
    fp32_flops: float = 0.0
    """FLOP/s of plain fp32 matrix products (no TF32)."""
    power_w: float = 0.0
    """Power limit at which the chip lowers its clock; 0: unknown."""
    device: Literal["gpu", "cpu"] = "gpu"
    sustained: float = 0.8
    """Fraction of the tensor rates that the best large matrix product sustains under the power limit (see `gpus`)."""


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of the tree: it connects other switches or nodes."""

    name: str
    switches: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Nodes of one kind and the network between them."""

    name: str
    nodes: tuple[str, ...]
    """Node names, in the order of the file or of Slurm."""
    gpus_per_node: int
    gpu: Gpu
    nics_per_node: int
    nic_bandwidth: float
    """bytes/s of one NIC in one direction (400 Gb/s: 50e9)."""
    rails: int
    """NIC r of every node is connected to rail r. Equal to nics_per_node, or 1 if the fabric is not rail-optimised."""
    host_memory_bytes: int
    switches: tuple[Switch, ...] = ()
    """Empty: one switch connects all nodes (one rail group)."""
    node_mtbf_hours: float = 0.0
    """Mean time between failures of one node; 0: the default of `planner.reliability`."""
    nvlink_nodes: int = 1
    """Nodes that share one NVLink domain (1 for HGX)."""
    coefficients: dict[str, float] = field(default_factory=dict)
    """Coefficients measured at this site, by key in the book."""
    sources: dict[str, str] = field(default_factory=dict)
    """Key in the book (`cluster.nic_bandwidth`, a coefficient, ...) -> source of its value."""

    @property
    def total_gpus(self) -> int:
        return len(self.nodes) * self.gpus_per_node
