"""Activations of one transformer layer that autograd keeps until the backward pass, in bytes per token on a rank.

Which tensors are kept, of which type, and what divides them, follows section 4 of Korthikanti et al. (arXiv
2205.05198), without the attention scores (flash attention keeps none), with grouped K and V, SwiGLU and experts:

    norms        both inputs 2 h + 2 h, both outputs 2 h + 2 h (1 h each in FP8)
    attention    q 2 q, k and v 4 kv, output 2 q (+ 1 q in FP8: the flash kernel keeps bf16, the matrix after it FP8)
    MLP          fc1 output 4 ffn (SwiGLU) or 2 ffn, activation output 2 ffn (1 ffn in FP8)
    dropout      two masks of h (GPT style)

Together 33.5 h for Llama-70B, 34 h for GPT. TP divides what lies between the matrices; norms and masks only with
sequence parallelism.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from launch.model.shape import ModelShape
from launch.plan.layouts import TrainingLayout

TrainerEngine = Literal["megatron-rl", "megatron", "fsdp"]
"""What kind of program trains. `megatron-rl`: this repository's trainer; `megatron`: pre-training and RL systems on
Megatron-Core; `fsdp`: PyTorch FSDP2 with compiled blocks (torchtitan, AutoModel)."""


class LayerActivations(NamedTuple):
    """Bytes per token of the micro-batch's shard on a CP rank, of one layer on one TP rank."""

    kept: float
    """From forward to backward."""
    working: float
    """While the layer's backward pass runs: what it recomputes, gradients of its widest tensors, gathered inputs."""


@lru_cache(maxsize=4096)
def layer_activations(shape: ModelShape, tp: int, sequence_parallel: bool, precision: str, recompute: tuple[str, ...],
                      engine: TrainerEngine = "megatron", dropout: bool = False, etp: int = 1) -> LayerActivations:
    """One layer. `recompute` as in `TrainingLayout`; names that it does not know change nothing."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    wide = 4 if precision == "fp32" else 2
    # Type of a matrix product's saved input; the FP8 of FSDP programs (torchao) casts again in the backward pass.
    linear = 1 if precision == "fp8" and engine != "fsdp" else wide
    outer = 1 / tp if sequence_parallel else 1.0    # what divides tensors outside the matrices
    inner = 1 / tp

    norm_inputs = 2 * wide * h * outer
    norm_outputs = 2 * linear * h * outer
    masks = 2 * h * outer if dropout else 0.0
    qk_norm = wide * (q + kv) * inner if shape.qk_norm else 0.0
    attention_output = (wide + (linear if linear < wide else 0)) * q * inner
    attention = wide * (q + 2 * kv) * inner + qk_norm + attention_output
    fc1, act = _mlp(shape, wide, linear, inner, etp)
    every = norm_inputs + norm_outputs + masks + attention + fc1 + act

    # Gradients of the fc1 output and of the activation, and two gathered inputs (not split over TP).
    gradient = _widest(shape, wide, inner) + (2 * wide * h if tp > 1 else 0)
    if "full" in recompute:
        return LayerActivations(wide * h * outer, every + gradient)
    if "selective_op" in recompute:
        # Every second matrix product is recomputed: q, v, the first MLP matrix and the MLP's output are kept
        # (torchtitan's per-operator policy), with the attention output and the layer's input.
        kept = (2 * wide * h + 2 * wide * q * inner + wide * kv * inner + fc1 / max(1, shape.mlp_matrices - 1))
        return LayerActivations(kept, every - kept + gradient)
    kept = every
    if "layernorm" in recompute:
        kept -= norm_outputs
    if "mlp" in recompute or "moe" in recompute:
        kept -= fc1 + act
    elif "moe_act" in recompute or "activation" in recompute:
        kept -= act
    return LayerActivations(kept, every - kept + gradient)


def _mlp(shape: ModelShape, wide: int, linear: int, inner: float, etp: int) -> tuple[float, float]:
    """(fc1 output and, for experts, the permuted input; activation output)."""
    gates = shape.mlp_matrices - 1
    dense = shape.shared_ffn if shape.experts else shape.ffn
    fc1, act = wide * gates * dense * inner, linear * dense * inner
    if shape.experts:
        # Balanced routing: a rank works on as many (token, expert) pairs as its share of the tokens has; with ETP on
        # those of its group, each with a part of the expert.
        picked = shape.experts_per_token * inner
        fc1 += wide * gates * shape.moe_ffn * picked + linear * shape.hidden * picked * etp
        act += linear * shape.moe_ffn * picked
    return fc1, act


def _widest(shape: ModelShape, wide: int, inner: float) -> float:
    """Gradients that live while the MLP's backward runs."""
    width = shape.moe_ffn * shape.experts_per_token + shape.shared_ffn if shape.experts else shape.ffn
    return wide * shape.mlp_matrices * width * inner


def of_layout(shape: ModelShape, layout: TrainingLayout, engine: TrainerEngine, dropout: bool) -> LayerActivations:
    """`layer_activations` with the sizes of a layout."""
    return layer_activations(shape, layout.tp, layout.sequence_parallel, layout.precision, layout.recompute, engine,
                             dropout, layout.etp)


def in_flight(stage: int, pp: int, vpp: int, micro_batches: int) -> int:
    """Model chunks of a rank whose activations are alive at once.

    1F1B: min(m, PP - i). Interleaved (Narayanan et al., arXiv 2104.04473, section 2.2, as Megatron warms up):
    min(m v, 2 (PP - r - 1) + (v - 1) PP + 1) chunks of a v-th of the stage's layers.
    """
    if vpp == 1:
        return min(micro_batches, pp - stage)
    return min(micro_batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
