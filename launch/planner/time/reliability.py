"""Failures and checkpoints of a job: MTBF, checkpoint interval, effective time ratio, and the time of a version of the
weights on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.reliability import ReliabilityCoefficients
from launch.plan.book import line, part
from launch.plan.layouts import Precision, wide_bytes

STATE_BYTES = {"bf16": 14, "fp8": 14, "fp32": 12}
"""Bytes of a trained parameter in a checkpoint: the weight, an fp32 master copy unless it is fp32, two fp32 moments."""


@dataclass(eq=False)
class Failures:
    """How a job fails and recovers. The checkpoint interval is Young's, in whole steps: sqrt(2 x checkpoint x MTBF)
    (Young 1974, Daly 2006). Checkpoints take C / (interval + C) of the time. A failure costs half an interval and a
    restart."""

    PREFIX = "reliability"

    parameters: int
    """Number of parameters in a checkpoint: those of the model, or with LoRA those of the adapters."""
    step_s: float
    nodes: int
    """Number of nodes in use. The failure of any of them ends the attempt."""
    training_nodes: int
    cluster: ClusterSpec
    c: ReliabilityCoefficients
    precision: Precision = "bf16"
    """Precision of the trained weights."""

    @line("h", "MTBF of a node (the cluster's, else the default) / nodes")
    @part
    def job_mtbf_hours(self) -> float:
        return (self.cluster.node_mtbf_hours or self.c.node_mtbf_hours) / self.nodes

    @line("s", lambda self: f"{STATE_BYTES[self.precision]} bytes x trained parameters / (bandwidth x training nodes)")
    @part
    def checkpoint_s(self) -> float:
        return STATE_BYTES[self.precision] * self.parameters / (self.c.checkpoint_bandwidth * self.training_nodes)

    @line("steps", "sqrt(2 x checkpoint x MTBF) / step, rounded (Young 1974)")
    @part
    def every_steps(self) -> int:
        seconds = math.sqrt(2 * self.checkpoint_s * self.job_mtbf_hours * 3600)
        return max(1, round(seconds / self.step_s))

    @line("", "1 - C/(interval + C) - (interval/2 + restart)/MTBF")
    def effective_time_ratio(self) -> float:
        interval, checkpoint = self.every_steps * self.step_s, self.checkpoint_s
        lost = checkpoint / (interval + checkpoint) + (interval / 2 + self.c.restart_s) / (self.job_mtbf_hours * 3600)
        return max(0.0, 1 - lost)


def disk_seconds(parameters: int, training_nodes: int, coefficients: ReliabilityCoefficients, *,
                 precision: Precision = "bf16") -> float:
    """Seconds to write a version of the weights to disk and read it back (`weight_sync.disk`)."""
    return 2 * wide_bytes(precision) * parameters / (coefficients.checkpoint_bandwidth * training_nodes)
