"""What a plan predicts, and why it is what it is: the part of `plan.json` that no process of a run depends on.

Integers for bytes, floats for seconds. A number that no machine produced is a prediction, and every number here is one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

PhaseName = Literal["rollout", "reward", "logprob", "reference", "train", "sync"]
Partitions = Literal["training", "rollout", "both"]
TargetVerdict = Literal["reached", "within its uncertainty", "missed", "no target"]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ClusterFacts(Record):
    """The cluster that was planned for."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: str
    nics_per_node: int
    nic_bandwidth: float
    """bytes/s of one NIC."""
    rails: int
    leaves: tuple[int, ...]
    """Nodes under each leaf switch; one number where all share one."""
    source: str
    """The file, or the live system, that it was read from."""


class NodeSplit(Record):
    mode: Literal["disaggregated", "colocated", "hybrid"]
    training: int
    """Nodes that train (colocated and hybrid: all that are used)."""
    rollout: int
    """Nodes that roll out only."""
    spare: int
    """Nodes that the plan leaves out: asked for, or left over by the layouts."""


class MemoryOf(Record):
    """Memory of one GPU of a role."""

    role: Literal["training", "rollout"]
    name: str
    """`stage 0`, ..., or `engine`."""
    components: dict[str, int]
    """bytes; they sum to `total`."""
    total: int
    limit: int
    verdict: Literal["fits", "tight", "no"]


class Phase(Record):
    """A phase of the step; phases of an asynchronous step overlap."""

    name: PhaseName
    seconds: float
    low: float
    high: float
    starts: float
    """Seconds after the step's beginning, for the Gantt chart."""
    partition: Partitions


class Throughput(Record):
    """Prompts an hour."""

    low: float
    nominal: float
    high: float
    target: float | None
    verdict: TargetVerdict


class SyncEdge(Record):
    """Weight traffic from one node to another, all shards of a sync together."""

    partition: Literal["training", "rollout"]
    """Where the sender belongs; a rollout node forwards."""
    source: int
    """Number of the sender inside its partition."""
    target: int
    """Number of the receiver inside the rollout partition."""
    bytes: int
    hop: int
    """0 from a training node, 1 from a node that got it from there, ..."""


class SyncRoute(Record):
    """A way for the weights to travel."""

    route: Literal["direct", "chain", "tree", "in place"]
    lower_bound_s: float
    expected_s: float
    busiest_nic_out_bytes: int
    busiest_nic_in_bytes: int
    hops: int
    chunk_bytes: int = 0
    """Of a bucket; 0 where nothing crosses a network."""
    communicators: int = 0
    """Most that a GPU takes part in; 0 without GPUs."""
    communicator_bytes: int = 0
    """Most that they take of a GPU."""
    edges: tuple[SyncEdge, ...] = ()
    """Node to node, for the picture; () where nothing crosses a network."""


class DiskForecast(Record):
    """A version of the weights on disk (`weight_sync.disk`)."""

    every: int
    """Steps between two of them."""
    bytes: int
    seconds: float
    """Written and read back, beside a rollout."""


class SyncForecast(Record):
    chosen: str
    reason: str
    payload_bytes: int
    """Bytes of one copy of what travels."""
    routes: tuple[SyncRoute, ...]
    gpu_order: tuple[int, ...]
    """Local GPU of each TP rank of an engine, so that its traffic stays on its rail; () where any order does."""
    staging: Literal["in_place", "shadow"] = "in_place"
    """Where engines receive: into the weights that they serve, or into a second copy."""
    pauses: dict[str, float] = {}
    """Staging -> seconds for which the engines serve nothing at a sync; {} where nothing crosses a network."""
    cross_rail_bytes_natural: int
    cross_rail_bytes: int
    """Bytes that leave their rail, an engine and sync, in natural order and in `gpu_order`."""
    disk: DiskForecast | None = None
    """None: no version is written to disk."""


class RolloutForecast(Record):
    tpot_s: float
    """Seconds an output token at the mean running batch."""
    tokens_per_s_per_gpu: float
    in_flight: float
    """Mean sequences running, all engines together."""
    capacity: float
    """Sequences that the KV cache of all engines holds at the mean context."""
    load: float
    """in_flight over what the engines can hold at once."""
    longest_s: float
    """Seconds of a completion that runs to the cap, alone in a small batch."""
    bound_by: str


class Staleness(Record):
    versions: int
    """Most versions that a sample is old when it is trained on: ceil(longest completion / step); 0 when synchronous."""
    mean: float
    limit: int | None
    """`algorithm.max_staleness`."""


class Reliability(Record):
    job_mtbf_hours: float
    checkpoint_s: float
    checkpoint_every_steps: int
    restart_s: float
    effective_time_ratio: float
    """Share of the time that is progress."""


class Alternative(Record):
    """What was not chosen, and the number that rejected it."""

    value: str
    rejected_by: str
    prompts_per_hour: float | None = None


class Choice(Record):
    key: str
    value: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


class Pareto(Record):
    """A point of the front: no other plan has both fewer GPUs and more prompts an hour."""

    nodes: int
    training: int
    rollout: int
    layout: str
    prompts_per_hour: float


class Warned(Record):
    code: str
    """`W001`, ...: docs/plan.md explains each."""
    message: str


class Number(Record):
    """A line of the book."""

    key: str
    value: float
    unit: str = ""
    formula: str = ""
    inputs: tuple[str, ...] = ()
    source: str = ""


class Forecast(Record):
    cluster: ClusterFacts
    split: NodeSplit
    asynchronous: bool
    memory: tuple[MemoryOf, ...]
    phases: tuple[Phase, ...]
    step_s: float
    step_low_s: float
    step_high_s: float
    bottleneck: str
    """What a faster step needs: the phase or partition that sets its length, and what binds it."""
    throughput: Throughput
    rollout: RolloutForecast
    staleness: Staleness
    sync: SyncForecast
    reliability: Reliability
    choices: tuple[Choice, ...]
    pareto: tuple[Pareto, ...]
    warnings: tuple[Warned, ...]
    numbers: tuple[Number, ...]
