"""Coefficients of `planner.training_time`."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import PART, Coefficients, Range, coefficient

_FIT = "calibrated: launch/accuracy/training.py on benchmarks/measured/training.yaml"


@dataclass(frozen=True)
class TrainingCoefficients(Coefficients):
    """Share of the datasheet rates that training reaches, before the effects that the formulas count."""

    PREFIX = "coefficients.training"

    gemm_bf16: float = coefficient(0.877, "", "rate of a large bf16 matrix product over the sustained rate", _FIT)
    gemm_fp8: float = coefficient(0.824, "", "rate of a large fp8 matrix product over the sustained fp8 rate", _FIT)
    gemm_memory: float = coefficient(
        0.444, "", "share of the HBM time of a product's operands that its arithmetic does not hide", _FIT, PART)
    attention: float = coefficient(
        0.412, "", "rate of fused attention, including backward recomputation, over the sustained bf16 rate", _FIT)
    hbm: float = coefficient(0.706, "", "bandwidth of element-wise kernels over the HBM's", _FIT)
    tp_exposed: float = coefficient(
        0.6, "", "share of the TP collectives' time that no matrix product hides", _FIT, PART)
    overlap_cost: float = coefficient(
        0.152, "", "share of a hidden second of DP, FSDP or pipeline traffic that slows the computation", _FIT, PART)
    layer_s: float = coefficient(
        0.000109, "s", "gaps between the kernels of a layer, per pass of a micro-batch", _FIT)
    step_s: float = coefficient(0.0319, "s", "fixed part of an optimizer step: data, gradient norm, logging", _FIT)
    fsdp_rate: float = coefficient(0.872, "", "engine class fsdp: speed of its compute over Megatron's", _FIT,
                                    Range(1e-3, 2))
