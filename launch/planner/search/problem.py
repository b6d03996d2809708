"""From a configuration, a model and a cluster to the `Problem` that the search solves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.config import auto
from launch.config.load import LoadedConfig
from launch.config.schema import RunConfig
from launch.model.shape import ModelShape
from launch.planner.search.space import Pins
from launch.planner.workload.workload import Workload, workload_of

Mode = Literal["disaggregated", "colocated", "hybrid"]

MIB = 1 << 20


def problem_of(loaded: LoadedConfig, shape: ModelShape, cluster: ClusterSpec) -> Problem:
    """The problem, whatever its mode (`modes`).

    Raises:
        UserError: response lengths that are impossible.
    """
    config = loaded.config
    return Problem(
        shape=shape, workload=workload_of(loaded), cluster=cluster, pins=pins_of(loaded),
        coefficients=SiteCoefficients.of(cluster.coefficients), asynchronous=config.algorithm.asynchronous,
        lora_rank=config.model.lora_rank or 0,
        token_budget=token_budget(config, cluster), route=config.weight_sync.route,
        bucket_bytes=int(config.weight_sync.bucket_mb * MIB), shadow=config.weight_sync.staging == "shadow",
        max_staleness=config.algorithm.max_staleness,
        mode_pinned=config.placement.mode != "auto", spare_nodes=config.placement.spare_nodes,
        disk_every=config.weight_sync.disk.every)


def token_budget(config: RunConfig, cluster: ClusterSpec) -> int:
    """The pinned one, or one that every multiple divides to which a layout of the search pads sequences."""
    trainer, node = config.trainer, cluster.gpus_per_node
    if trainer.token_budget != "auto":
        return trainer.token_budget
    tp, cp = (1 if size == "auto" else size for size in (trainer.tp, trainer.cp))
    return auto.token_budget(config, math.lcm(64, 2 * tp * cp, 2 * node * cp))


def modes(loaded: LoadedConfig) -> tuple[Mode, ...]:
    """The modes to search."""
    mode = loaded.config.placement.mode
    return ("disaggregated", "colocated", "hybrid") if mode == "auto" else (mode,)


def pins_of(loaded: LoadedConfig) -> Pins:
    """The sizes that the configuration fixes."""
    config = loaded.config

    def pinned(key: str):
        value = auto.value(config, key)
        return None if value == "auto" else value

    return Pins(
        tp=pinned("trainer.tp"), pp=pinned("trainer.pp"), vpp=pinned("trainer.vpp"), cp=pinned("trainer.cp"),
        dp=pinned("trainer.dp"), sequence_parallel=pinned("trainer.sequence_parallel"),
        recompute=pinned("trainer.recompute"), training_nodes=pinned("placement.training_nodes"),
        replicas=pinned("rollout.replicas"), rollout_tp=pinned("rollout.tp"),
        max_num_seqs=pinned("rollout.max_num_seqs"), precision=config.trainer.dtype,
        rollout_precision=config.rollout.dtype, distributed_optimizer=config.trainer.distributed_optimizer,
        memory_utilization=config.rollout.memory_utilization, cuda_graphs=not config.rollout.enforce_eager,
        tp_across_nodes=config.placement.tp_across_nodes)


def chosen_values(found, config) -> dict[str, object]:
    """The keys that were `auto`, with what the plan says."""
    training, rollout = found.training.layout, found.rollout.layout
    names = {(): "none", ("full",): "full", ("core_attn",): "selective"}
    values = {
        "trainer.tp": training.tp, "trainer.pp": training.pp, "trainer.vpp": training.vpp, "trainer.cp": training.cp,
        "trainer.dp": training.dp, "trainer.sequence_parallel": training.sequence_parallel,
        "trainer.recompute": names[training.recompute], "trainer.token_budget": found.problem.token_budget,
        "rollout.replicas": rollout.replicas, "rollout.tp": rollout.tp, "rollout.max_num_seqs": rollout.max_num_seqs,
        "placement.training_nodes": found.training.units, "placement.mode": found.mode}
    chosen = {key: values[key] for key in auto.open_keys(config)}
    if found.mode != "disaggregated" and config.algorithm.asynchronous:
        chosen["algorithm.asynchronous"] = False        # trainer and engine take turns on a GPU
    if found.mode != "disaggregated" and config.weight_sync.staging == "shadow":
        chosen["weight_sync.staging"] = "in_place"
    if rollout.memory_utilization != config.rollout.memory_utilization:
        chosen["rollout.memory_utilization"] = rollout.memory_utilization
    return chosen


@dataclass(frozen=True)
class Problem:
    """What is to be planned."""

    shape: ModelShape
    workload: Workload
    cluster: ClusterSpec
    pins: Pins
    coefficients: SiteCoefficients
    asynchronous: bool = False
    lora_rank: int = 0
    token_budget: int = 8192
    bucket_bytes: int = 256 << 20
    route: str = "auto"
    shadow: bool = False
    """Engines receive new weights into a second copy, and stop for the swap only."""
    max_staleness: int | None = None
    """Versions that a sample may be old, when asynchronous; the trainer waits rather than use an older one."""
    kv_tokens: int | None = None
    """Cache of an engine where the configuration fixes it (CPU); None: what the GPU's memory leaves."""
    mode_pinned: bool = True
    """The configuration names the mode; else the fastest was taken."""
    spare_nodes: int = 0
    """Nodes that the plan leaves alone."""
    disk_every: int = 0
    """Steps between versions of the weights that are written to disk; 0: none is."""

    @property
    def unit_gpus(self) -> int:
        return 1 if len(self.cluster.nodes) == 1 else self.cluster.gpus_per_node

    @property
    def units(self) -> int:
        return (len(self.cluster.nodes) - self.spare_nodes) * self.cluster.gpus_per_node // self.unit_gpus


def in_mode(problem: Problem, mode: Mode) -> Problem:
    """The problem as a mode has it: trainer and engine that take turns on a GPU are synchronous, and nothing is
    received while an engine serves."""
    return problem if mode == "disaggregated" else replace(problem, asynchronous=False, shadow=False)
