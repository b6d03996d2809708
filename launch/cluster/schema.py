"""The typed model of a cluster file, `configs/clusters/*.yaml`: one class a section, one docstring a key."""

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
    """Number of nodes. With `names`, it must be their number."""
    names: Names | None = None
    """Names, in the order in which the planner fills nodes; without them node[001-...]."""


class Gpus(Section):
    kind: str
    """A row of the GPU table (`launch/cluster/gpus.py`): H100-SXM-80GB, or its short name h100. CPU-core: this
    machine's processor, one core for each rank."""
    per_node: Count
    """GPUs of one node."""
    memory_gb: Figure | None = None
    """What one GPU offers to a process, in GB of 1e9 bytes, where it is not what the table says
    (`torch.cuda.mem_get_info` gives it)."""
    memory_gb_per_s: Figure | None = None
    """Memory bandwidth, where it is not the datasheet's."""
    nvlink_gb_per_s: Figure | None = None
    """All NVLinks of one GPU together, one direction, where it is not the datasheet's."""


class SwitchEntry(Section):
    name: str = Field(min_length=1)
    """Name of the switch, unique in the file."""
    nodes: Count | Names | None = None
    """A leaf switch: its nodes by name, or how many (the next ones in the order of `nodes`)."""
    switches: Names | None = None
    """Any other switch: the switches below it, by name."""


class Network(Section):
    nics_per_node: Count
    """NICs of one node that carry the job's traffic (not the one for storage and login)."""
    nic_gbit_per_s: Figure
    """Line rate of one NIC, one direction, in Gbit/s."""
    rails: Count
    """Equal to `nics_per_node` where NIC r of every node hangs on leaf switch r (rail-optimised), else 1."""
    nvlink_nodes: Count = 1
    """Nodes that share one NVLink domain: 1 for HGX and DGX boxes, 18 for an NVL72 rack of 4-GPU trays."""
    switches: list[SwitchEntry] = []
    """The switch tree; without it every node reaches every other through one switch (one rail group)."""


class Host(Section):
    memory_gb: Figure
    """Memory of one node's host, in GB of 1e9 bytes."""


class Coefficient(Section):
    value: float
    """What was measured here, in place of the shipped value."""
    source: str
    """Where the value came from: the run, or the measurement."""


class ClusterFile(Section):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the cluster; without it, the name of the file."""
    nodes: Nodes
    """How many nodes, and what they are called. All are of one kind."""
    gpus: Gpus
    """The GPUs of every node."""
    network: Network
    """NICs, rails and switches."""
    host: Host
    """The rest of a node."""
    node_mtbf_hours: Figure | None = None
    """Mean time between failures of one node; without it, the planner's sourced default."""
    coefficients: dict[str, Coefficient] = {}
    """Coefficients of the planner's models that were measured here, such as `training.efficiency`. Written by
    `megatron-rl plan calibrate RUN`."""
