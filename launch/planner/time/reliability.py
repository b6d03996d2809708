"""Failures and checkpoints of a job: MTBF, checkpoint interval, effective time ratio, and the time of a version of the
weights on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.reliability import ReliabilityCoefficients
from launch.plan.book import line, nonzero, part
from launch.plan.layouts import Precision, wide_bytes

STATE_BYTES = {"bf16": 14, "fp8": 14, "fp32": 12}
"""Bytes of a trained parameter in a checkpoint: the weight, an fp32 master copy unless it is fp32, two fp32 moments.
Megatron's distributed optimizer writes the master copy of an fp32 weight, too."""


@dataclass(eq=False)
class Failures:
    """How a job fails and recovers, and what its checkpoints cost. All training nodes write and read a checkpoint.

    The run waits W for a checkpoint: for writing it, or, with `checkpoint.async_save`, for the copy to host memory. The
    interval is Young's, in whole steps: sqrt(2 x W x MTBF) (Young 1974, Daly 2006), but no shorter than writing takes.
    Checkpoints take W / (interval + W) of the time. A failure costs half an interval, a restart, and the time of
    writing beside the steps, in which the newest checkpoint is not there yet."""

    PREFIX = "reliability"

    parameters: int
    """Number of parameters in a checkpoint: those of the model, or with LoRA those of the adapters."""
    step_s: float
    nodes: int
    """Number of nodes in use. The failure of any of them ends the attempt."""
    training_nodes: int
    training_gpus: int
    cluster: ClusterSpec
    c: ReliabilityCoefficients
    precision: Precision = "bf16"
    """Precision of the trained weights."""
    async_save: bool = True
    distributed_optimizer: bool = True

    @line("h", "MTBF of a node (the cluster's, else the default) / nodes")
    @part
    def job_mtbf_hours(self) -> float:
        return (self.cluster.node_mtbf_hours or self.c.node_mtbf_hours) / self.nodes

    @property
    def state_bytes(self) -> int:
        """Of a parameter, in a checkpoint."""
        return STATE_BYTES[self.precision] + (4 if self.precision == "fp32" and self.distributed_optimizer else 0)

    @line("bytes", lambda self: f"{self.state_bytes} bytes x trained parameters")
    @part
    def checkpoint_bytes(self) -> int:
        return self.state_bytes * self.parameters

    @line("s", "written: checkpoint / min(bandwidth of a node x training nodes, bandwidth of the file system)")
    @part
    def checkpoint_s(self) -> float:
        rate = min(self.c.checkpoint_bandwidth * self.training_nodes, self.c.file_system_bandwidth)
        return self.checkpoint_bytes / rate

    @line("s", lambda self: "copied to host memory: checkpoint / (bandwidth of a GPU x training GPUs)"
          if self.async_save else "written: checkpoint.async_save is false")
    @part
    def checkpoint_wait_s(self) -> float:
        if not self.async_save:
            return self.checkpoint_s
        return self.checkpoint_bytes / (self.c.host_copy_bandwidth * self.training_gpus)

    @line("s", "read: checkpoint / min(bandwidth of a node x training nodes, bandwidth of the file system)")
    @part
    def load_s(self) -> float:
        rate = min(self.c.checkpoint_read_bandwidth * self.training_nodes, self.c.file_system_bandwidth)
        return self.checkpoint_bytes / rate

    @line("bytes", "the copy that is written: checkpoint / training GPUs x GPUs of a node", written=nonzero)
    @part
    def host_bytes(self) -> int:
        """Page-locked host memory of a training node, which it keeps from the first checkpoint on."""
        if not self.async_save:
            return 0
        return self.checkpoint_bytes * min(self.cluster.gpus_per_node, self.training_gpus) // self.training_gpus

    @line("steps", "sqrt(2 x wait x MTBF) / step, rounded (Young 1974), at least written / step")
    @part
    def every_steps(self) -> int:
        seconds = math.sqrt(2 * self.checkpoint_wait_s * self.job_mtbf_hours * 3600)
        return max(1, round(seconds / self.step_s), math.ceil(self.checkpoint_s / self.step_s))

    @line("", "1 - W/(interval + W) - (interval/2 + written beside the steps + restart)/MTBF")
    def effective_time_ratio(self) -> float:
        interval, wait = self.every_steps * self.step_s, self.checkpoint_wait_s
        beside = self.checkpoint_s if self.async_save else 0.0
        repeated = (interval / 2 + beside + self.c.restart_s) / (self.job_mtbf_hours * 3600)
        return max(0.0, 1 - wait / (interval + wait) - repeated)


def disk_seconds(parameters: int, training_nodes: int, coefficients: ReliabilityCoefficients, *,
                 precision: Precision = "bf16") -> float:
    """Seconds to write a version of the weights to disk and read it back (`weight_sync.disk`)."""
    rate = min(coefficients.checkpoint_bandwidth * training_nodes, coefficients.file_system_bandwidth)
    return 2 * wide_bytes(precision) * parameters / rate
