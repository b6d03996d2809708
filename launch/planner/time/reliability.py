"""How often the job fails, how often to write a checkpoint, what share of the time is progress; what a version of
the weights on disk takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.reliability import ReliabilityCoefficients
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import Precision

STATE_BYTES = {"bf16": 14, "fp8": 14, "fp32": 12}
"""A trained parameter in a checkpoint: the weight, its fp32 master copy where it is not fp32 itself, two fp32 moments."""


WEIGHT_BYTES = {"bf16": 2, "fp8": 2, "fp32": 4}
"""A parameter in a Hugging Face folder."""


@dataclass(frozen=True, slots=True)
class Reliability:
    job_mtbf_hours: float
    checkpoint_s: float
    every_steps: int
    effective_time_ratio: float


def reliability(parameters: int, step_s: float, nodes: int, training_nodes: int, cluster: ClusterSpec,
                coefficients: ReliabilityCoefficients, *, precision: Precision = "bf16",
                parameters_key: str = "model.parameters", book: Book = NO_BOOK) -> Reliability:
    """Young's interval, in whole steps (Young 1974, Daly 2006): sqrt(2 x checkpoint x MTBF); of the time, checkpoints
    take C / (interval + C), and each failure costs half an interval and a restart.

    Args:
        parameters: those that a checkpoint holds: of the model, or with LoRA of the adapters.
        precision: of the trained weights.
        parameters_key: where the book has `parameters`.
        nodes: nodes whose failure ends the attempt.
    """
    node_mtbf = cluster.node_mtbf_hours or coefficients.node_mtbf_hours
    default = () if cluster.node_mtbf_hours else ("coefficients.reliability.node_mtbf_hours",)
    job_mtbf = book.computed("reliability.job_mtbf_hours", node_mtbf / nodes, "h",
                             "MTBF of a node (the cluster's, else the default) / nodes",
                             ("cluster.node_mtbf_hours", *default, "plan.nodes"))
    state = STATE_BYTES[precision] * parameters
    checkpoint = book.computed(
        "reliability.checkpoint_s", state / (coefficients.checkpoint_bandwidth * training_nodes), "s",
        f"{STATE_BYTES[precision]} bytes x trained parameters / (bandwidth x training nodes)",
        (parameters_key, "trainer.precision", "coefficients.reliability.checkpoint_bandwidth", "plan.training_nodes"))
    seconds = math.sqrt(2 * checkpoint * job_mtbf * 3600)
    steps = book.computed("reliability.every_steps", max(1, round(seconds / step_s)), "steps",
                          "sqrt(2 x checkpoint x MTBF) / step, rounded (Young 1974)",
                          ("reliability.checkpoint_s", "reliability.job_mtbf_hours", "step.total_s"))
    interval = steps * step_s
    lost = checkpoint / (interval + checkpoint) + (interval / 2 + coefficients.restart_s) / (job_mtbf * 3600)
    ratio = book.computed("reliability.effective_time_ratio", max(0.0, 1 - lost), "",
                          "1 - C/(interval + C) - (interval/2 + restart)/MTBF",
                          ("reliability.every_steps", "step.total_s", "reliability.checkpoint_s",
                           "reliability.job_mtbf_hours", "coefficients.reliability.restart_s"))
    return Reliability(job_mtbf, checkpoint, steps, ratio)


def disk_seconds(parameters: int, training_nodes: int, coefficients: ReliabilityCoefficients, *,
                 precision: Precision = "bf16", book: Book = NO_BOOK) -> float:
    """Seconds from the beginning of a version's write to disk until it is there, read back (`weight_sync.disk`)."""
    nbytes = WEIGHT_BYTES[precision] * parameters
    return book.computed("sync.disk_s", 2 * nbytes / (coefficients.checkpoint_bandwidth * training_nodes), "s",
                         f"written and read back: 2 x {WEIGHT_BYTES[precision]} bytes x parameters / (bandwidth x "
                         "training nodes)", ("model.parameters", "trainer.precision", "plan.training_nodes",
                                             "coefficients.reliability.checkpoint_bandwidth"))
