"""The typed model of a cluster file, `configs/clusters/*.yaml`: one class per section, one docstring per key."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import Field

from launch.config.schema import Section

Count = Annotated[int, Ge(1), Le(100_000)]
Figure = Annotated[float, Gt(0), Le(1e9)]
Names = str | list[str]
"""A host list as Slurm writes it (`node[001-032]`), or a list of names or host lists."""


class Nodes(Section):
    count: Count | None = None
    """Number of nodes. Must equal the number of `names`, if both are given."""
    names: Names | None = None
    """Node names, in the order in which the planner fills nodes. Default: node[001-...]."""


class Gpus(Section):
    kind: str
    """A row of the GPU table (`launch/cluster/gpus.py`): H100-SXM-80GB, or its short name h100. CPU-core is this
    machine's processor, one core for each rank."""
    per_node: Count
    """GPUs per node."""
    memory_gb: Figure | None = None
    """Memory of one GPU that a process can use, in GB of 1e9 bytes, if it differs from the table
    (`torch.cuda.mem_get_info` returns it)."""
    memory_gb_per_s: Figure | None = None
    """Memory bandwidth in GB/s, if it differs from the datasheet."""
    nvlink_gb_per_s: Figure | None = None
    """Bandwidth of all NVLinks of one GPU in one direction, in GB/s, if it differs from the datasheet."""


class SwitchEntry(Section):
    name: str = Field(min_length=1)
    """Name of the switch, unique in the file."""
    nodes: Count | Names | None = None
    """Nodes of a leaf switch: their names, or their number (the next ones in the order of `nodes`)."""
    switches: Names | None = None
    """Names of the switches below any other switch."""


class Network(Section):
    nics_per_node: Count
    """NICs per node that carry the job's traffic (not the one for storage and login)."""
    nic_gbit_per_s: Figure
    """Line rate of one NIC, one direction, in Gbit/s."""
    rails: Count
    """Equal to `nics_per_node` if NIC r of every node is connected to leaf switch r (rail-optimised), else 1."""
    nvlink_nodes: Count = 1
    """Nodes that share one NVLink domain: 1 for HGX and DGX boxes, 18 for an NVL72 rack of 4-GPU trays."""
    switches: list[SwitchEntry] = []
    """The switch tree. Default: one switch connects all nodes (one rail group)."""


class Host(Section):
    memory_gb: Figure
    """Host memory of one node, in GB of 1e9 bytes."""


class Coefficient(Section):
    value: float
    """The value measured here, which replaces the shipped value."""
    source: str
    """Source of the value: the run or the measurement."""


class ClusterFile(Section):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the cluster. Default: the name of the file."""
    nodes: Nodes
    """Number and names of the nodes. All nodes are of one kind."""
    gpus: Gpus
    """The GPUs of every node."""
    network: Network
    """NICs, rails and switches."""
    host: Host
    """The host of every node."""
    node_mtbf_hours: Figure | None = None
    """Mean time between failures of one node. Default: the planner's sourced value."""
    coefficients: dict[str, Coefficient] = {}
    """Coefficients of the planner's models measured on this cluster, such as `training.efficiency`. Written by
    `megatron-rl plan calibrate RUN`."""
