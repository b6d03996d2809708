"""Parts of a GPU's memory that no formula gives: the context, the allocator, an engine's graphs."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import PART, Coefficients, Range, coefficient

CALIBRATED = "calibrated on benchmarks/measured/memory.yaml: launch/accuracy/memory.py, calibrate"
NOTES = "CUDA context 0.5 GB, NCCL communicators and cuBLAS workspaces: 3 to 5 GB seen outside the allocator"


@dataclass(frozen=True)
class MemoryCoefficients(Coefficients):
    """Coefficients of `launch.planner.memory.training` and `launch.planner.memory.rollout`."""

    PREFIX = "coefficients.memory"

    context_bytes: float = coefficient(
        4.5e9, "bytes", "memory of a training rank outside the caching allocator: CUDA context, NCCL buffers of its "
        "process groups, library workspaces", NOTES)
    process_bytes: float = coefficient(
        0.6e9, "bytes", "memory of a rank on a CPU besides its tensors: interpreter and libraries",
        "resident set of a process that has imported torch and megatron.core")
    slack_share: float = coefficient(
        0.092, "", "reserved memory over allocated peak, less 1: what the caching allocator rounds up and cannot free",
        CALIBRATED, PART)
    fragmentation_share: float = coefficient(
        0.189, "", "with PP > 1, additional loss to fragmentation, as a share of the activations in flight",
        CALIBRATED, PART)
    expandable_share: float = coefficient(
        0.03, "", "replaces both with expandable segments, whose pages the allocator can give back",
        "an estimate: no development point states it", PART)
    margin_share: float = coefficient(
        0.06, "", "share of the GPU's memory that a plan leaves free",
        "a choice: micro-batches and NCCL buffers vary from step to step", Range(0, 0.95))
    tight_share: float = coefficient(0.92, "", "share of the limit above which a plan is called tight", "a choice")
    engine_context_bytes: float = coefficient(
        2.0e9, "bytes", "memory of a rollout rank besides weights, cache and graphs: CUDA context, NCCL, custom "
        "all-reduce",
        "vLLM start-up logs: 1 to 2.5 GB")
    graph_bytes: float = coefficient(
        1.0e9, "bytes", "CUDA graphs of the decode batch sizes, per rank", "vLLM start-up logs: 0.5 to 1.5 GB")


DEFAULT = MemoryCoefficients()
"""The shipped values."""
