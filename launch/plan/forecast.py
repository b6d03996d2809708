"""The predictions of a plan and the reasons for its choices. No process of a run depends on this part of `plan.json`.

Bytes are integers, seconds are floats. Every number here is a prediction, none is a measurement.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

PhaseName = Literal["rollout", "reward", "logprob", "reference", "teacher", "train", "sync"]
Partitions = Literal["training", "rollout", "both"]
TargetVerdict = Literal["reached", "within its uncertainty", "missed", "no target"]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ClusterFacts(Record):
    """The cluster that the plan is for."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: str
    nics_per_node: int
    nic_bandwidth: float
    """bytes/s of one NIC."""
    rails: int
    leaves: tuple[int, ...]
    """Number of nodes under each leaf switch; one number if all share a leaf."""
    source: str
    """The file or the live system that describes the cluster."""


class NodeSplit(Record):
    mode: Literal["disaggregated", "colocated", "hybrid"]
    training: int
    """Nodes that train; in the modes colocated and hybrid, all nodes in use."""
    rollout: int
    """Nodes that only roll out."""
    spare: int
    """Nodes that the plan does not use: requested spares, and nodes that the layouts leave over."""


class MemoryOf(Record):
    """Memory of one GPU of a partition."""

    role: Literal["training", "rollout"]
    name: str
    """`stage 0`, ..., or `engine`."""
    components: dict[str, int]
    """Bytes; the sum is `total`."""
    total: int
    limit: int
    verdict: Literal["fits", "tight", "no"]


class Phase(Record):
    """A phase of the step. The phases of an asynchronous step overlap. `reward` is the time from the last completion of
    a batch to its last score; the rest of the grading is hidden behind the rollout."""

    name: PhaseName
    seconds: float
    low: float
    high: float
    starts: float
    """Seconds from the start of the step, for the Gantt chart."""
    partition: Partitions


class Throughput(Record):
    """Prompts per hour."""

    low: float
    nominal: float
    high: float
    target: float | None
    verdict: TargetVerdict


class SyncEdge(Record):
    """Weight traffic from one node to another: all shards of a sync together."""

    partition: Literal["training", "rollout"]
    """Partition of the sender. A rollout node forwards what it received."""
    source: int
    """Number of the sender within its partition."""
    target: int
    """Number of the receiver within the rollout partition."""
    bytes: int
    hop: int
    """0: the sender is a training node; 1: the sender received the bytes from a training node; ..."""


class SyncRoute(Record):
    """A route of the weights."""

    route: Literal["direct", "chain", "tree", "in place"]
    lower_bound_s: float
    expected_s: float
    busiest_nic_out_bytes: int
    busiest_nic_in_bytes: int
    hops: int
    chunk_bytes: int = 0
    """Size of a bucket; 0 if nothing crosses a network."""
    communicators: int = 0
    """Largest number of communicators that a GPU takes part in; 0 without GPUs."""
    communicator_bytes: int = 0
    """Most memory that communicators take on a GPU."""
    communicators_total: int = 0
    """Communicators in the whole job; 0 without GPUs."""
    opening_rounds: int = 0
    """Rounds in which they are opened at the start, one at a time on each GPU."""
    opening_s: float = 0.0
    edges: tuple[SyncEdge, ...] = ()
    """Traffic between nodes, for the picture; () if nothing crosses a network."""


class DiskForecast(Record):
    """A version of the weights on disk (`weight_sync.disk`)."""

    every: int
    """Steps between two versions on disk."""
    bytes: int
    seconds: float
    """Time to write a version and read it back, during a rollout."""


class SyncForecast(Record):
    chosen: str
    reason: str
    payload_bytes: int
    """Bytes of one copy of the weights that travel."""
    routes: tuple[SyncRoute, ...]
    gpu_order: tuple[int, ...]
    """Local GPU of each TP rank of an engine, chosen so that traffic stays on its rail; () if any order works."""
    staging: Literal["in_place", "shadow"] = "in_place"
    """Where engines receive weights: `in_place` overwrites the served weights, `shadow` fills a second copy."""
    pauses: dict[str, float] = {}
    """Staging -> seconds of a sync in which the engines serve nothing; {} if nothing crosses a network."""
    cross_rail_bytes_natural: int
    cross_rail_bytes: int
    """Bytes that leave their rail, per engine and sync: in the natural order, and in `gpu_order`."""
    disk: DiskForecast | None = None
    """None: no version is written to disk."""


class RolloutForecast(Record):
    tpot_s: float
    """Seconds per output token at the mean running batch."""
    tokens_per_s_per_gpu: float
    in_flight: float
    """Mean number of running sequences, all engines together."""
    capacity: float
    """Sequences that the KV cache of all engines holds at the mean context."""
    load: float
    """`in_flight` divided by the number of sequences that the engines can hold at once."""
    longest_s: float
    """Seconds of a completion that runs to the cap, at the mean TPOT."""
    bound_by: str


class RewardForecast(Record):
    """Grading of a step. The phase `reward` is the part of it after the last completion."""

    nodes: int
    """Nodes with reward processes: those that train."""
    processes: int
    """On all of them."""
    sample_s: float
    """Seconds of a process for a completion."""
    busy_s: float
    """Seconds of a step for which all processes grade."""
    behind_s: float
    """Seconds of grading that are left when the last completion ends, without the last group."""


class Staleness(Record):
    versions: int
    """Largest age, in versions, of a token in training: `algorithm.max_staleness`, or what `auto` derives from the
    plan, ceil(longest completion / step); 0 if synchronous."""
    mean: float
    """Mean age of a token if engines have room for every batch that is handed out."""
    limit: int | None
    """`algorithm.max_staleness`."""


class Reliability(Record):
    job_mtbf_hours: float
    checkpoint_bytes: int
    checkpoint_s: float
    """Seconds to write a checkpoint."""
    checkpoint_wait_s: float
    """Seconds of these in which no step can be trained: with `checkpoint.async_save` those of the copy."""
    checkpoint_host_bytes: int
    """The copy, on a training node; 0 without `checkpoint.async_save`."""
    checkpoint_load_s: float
    """Seconds to read a checkpoint."""
    checkpoint_every_steps: int
    restart_s: float
    effective_time_ratio: float
    """Fraction of the time in which the job makes progress."""


class Alternative(Record):
    """A value that was not chosen, and the number that rejected it."""

    value: str
    rejected_by: str
    prompts_per_hour: float | None = None


class Choice(Record):
    key: str
    value: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()


class Pareto(Record):
    """A point of the Pareto front: no other plan has both fewer GPUs and more prompts per hour."""

    nodes: int
    training: int
    rollout: int
    layout: str
    prompts_per_hour: float


class Warned(Record):
    code: str
    """`W001`, `NO_CLIP`, ...; docs/plan.md explains each code."""
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
    """The phase or partition that sets the length of the step, and the resource that limits it."""
    throughput: Throughput
    rollout: RolloutForecast
    reward: RewardForecast | None = None
    """None: the plan of an older version."""
    staleness: Staleness
    sync: SyncForecast
    reliability: Reliability
    choices: tuple[Choice, ...]
    pareto: tuple[Pareto, ...]
    warnings: tuple[Warned, ...]
    numbers: tuple[Number, ...]
