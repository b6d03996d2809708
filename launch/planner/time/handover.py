"""The hand-over of weights on the same GPUs, which replaces the weight sync if trainer and engine share them.

    colocated   Tensors are gathered in full and loaded by the engine one by one, as in published systems. Their
                measurements include the move of the trainer's state to host memory and back.
    hybrid      Weights are resharded in place: over NVLink inside a node, and over the NICs for weights that the
                node's trainers do not hold.
"""

from __future__ import annotations

from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.fabric.shards import adapter_bytes
from launch.model.architecture import Architecture
from launch.plan.layouts import RolloutLayout, TrainingLayout, wide_bytes
from launch.planner.parameters import count, tensor_count
from launch.planner.time.step import refit_seconds


def handover_seconds(mode: Literal["colocated", "hybrid"], shape: Architecture, training: TrainingLayout,
                     rollout: RolloutLayout, cluster: ClusterSpec, coefficients: SiteCoefficients, *,
                     lora_rank: int = 0) -> float:
    """Seconds of one hand-over.

    Args:
        lora_rank: > 0: the hand-over moves only the adapters.
    """
    wide = wide_bytes(training.precision)
    size = shape.layers * adapter_bytes(shape, lora_rank, wide) if lora_rank else wide * count(shape)
    if mode == "colocated":
        return refit_seconds(size, tensor_count(shape), coefficients.rl)
    sync = coefficients.sync
    missing = size * max(0.0, 1 - cluster.gpus_per_node / training.replica_gpus)
    nics = cluster.nics_per_node * cluster.nic_bandwidth * sync.nic_efficiency
    rank = size / (rollout.tp * rollout.pp)
    nvlink = cluster.gpu.nvlink_bandwidth * sync.nvlink_efficiency
    return sync.pause_s + sync.barrier_s + missing / nics + rank / nvlink + rank / sync.digest_rate
