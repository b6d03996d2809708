"""Coefficients of `planner.rollout_decode` and `planner.rollout_time`."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import Coefficients, coefficient
from launch.coefficients.collectives import CollectiveCoefficients

_FIT = "calibrated: launch/accuracy/decode.py on benchmarks/measured/decode.yaml"
_NETWORK = CollectiveCoefficients()


@dataclass(frozen=True)
class RolloutCoefficients(Coefficients):
    """Share of the datasheet rates that an inference engine reaches, and the time that it adds."""

    PREFIX = "coefficients.rollout"

    hbm: float = coefficient(0.948, "", "HBM bandwidth reached while weights and KV cache are read", _FIT)
    gemm: float = coefficient(
        0.608, "", "rate of the matrix products over the datasheet's: prefill, and decode in BF16", _FIT)
    decode_gemm_fp8: float = coefficient(
        0.356, "", "rate of FP8 products of a decode step over the FP8 rate, activations quantised on the fly", _FIT)
    nvlink: float = coefficient(0.687, "", "bus bandwidth of the TP all-reduces over the NVLink bandwidth", _FIT)
    allreduce_s: float = coefficient(8.02e-06, "s", "latency of one TP all-reduce in a node", _FIT)
    node_hop_s: float = coefficient(
        _NETWORK.node_hop_s, "s", "latency of a step between nodes (pipeline stages, TP groups larger than a node)",
        "as coefficients.collectives.node_hop_s")
    nic_share: float = coefficient(
        _NETWORK.nic_share, "", "bus bandwidth across nodes over that of the NICs",
        "as coefficients.collectives.nic_share")
    layer_s: float = coefficient(4.54e-05, "s", "time of a layer's small kernels and of the gaps between kernels", _FIT)
    vllm_step_s: float = coefficient(0.000814, "s", "engine class vllm: host time of a step", _FIT)
    vllm_sequence_s: float = coefficient(
        4.51e-05, "s", "engine class vllm: time of a step for each running sequence (sampling, output)", _FIT)
    trtllm_step_s: float = coefficient(0.000466, "s", "engine class trtllm: host time of a step", _FIT)
    vllm2024_step_s: float = coefficient(
        0.00911, "s", "engine class vllm_2024: host time of a step (engine and API server in one process)", _FIT)
    vllm2024_sequence_s: float = coefficient(
        4.88e-05, "s", "engine class vllm_2024: time of a step for each running sequence", _FIT)
