"""Activations of one transformer layer that autograd keeps until the backward pass, in bytes per token on a rank.

The kept tensors, their types and their split follow section 4 of Korthikanti et al. (arXiv 2205.05198), with grouped K
and V, SwiGLU and experts, and without attention scores, which flash attention does not keep:

    norms        both inputs 2 h + 2 h, both outputs 2 h + 2 h (1 h each in FP8)
    attention    q 2 q, k and v 4 kv, output 2 q (+ 1 q in FP8: the flash kernel keeps bf16, the matrix after it FP8)
    MLP          fc1 output 4 ffn (SwiGLU) or 2 ffn, activation output 2 ffn (1 ffn in FP8)
    dropout      two masks of h (GPT style)

The sum is 33.5 h for Llama-70B and 34 h for GPT. TP divides the tensors between the matrices. It divides norms and
masks only with sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.model.architecture import Architecture
from launch.plan.book import part
from launch.plan.layouts import wide_bytes

TrainerEngine = Literal["megatron-rl", "megatron", "fsdp"]
"""The kind of trainer. `megatron-rl`: this repository's; `megatron`: pre-training and RL systems on Megatron-Core;
`fsdp`: PyTorch FSDP2 with compiled blocks (torchtitan, AutoModel)."""


@dataclass(eq=False)
class LayerActivations:
    """Bytes of one layer on one TP rank, per token of the micro-batch's shard on a CP rank."""

    shape: Architecture
    tp: int
    sequence_parallel: bool
    precision: str
    recompute: tuple[str, ...]
    """As in `TrainingLayout`. Unknown names have no effect."""
    engine: TrainerEngine
    dropout: bool
    etp: int

    @part
    def kept(self) -> float:
        """Bytes that are kept from the forward to the backward pass."""
        shape, wide = self.shape, self.wide
        if "full" in self.recompute:
            return wide * shape.hidden * self.outer
        if "selective_op" in self.recompute:
            # Every second matrix product is recomputed. q, v, the first MLP matrix and the MLP's output are kept
            # (torchtitan's per-operator policy), and so are the attention output and the layer's input.
            return (2 * wide * shape.hidden + 2 * wide * shape.q_width * self.inner + wide * shape.kv_width * self.inner
                    + self.fc1 / max(1, shape.mlp_matrices - 1))
        kept = self.every
        if "layernorm" in self.recompute:
            kept -= self.norm_outputs
        if "mlp" in self.recompute or "moe" in self.recompute:
            kept -= self.fc1 + self.act
        elif "moe_act" in self.recompute or "activation" in self.recompute:
            kept -= self.act
        return kept

    @part
    def working(self) -> float:
        """Additional bytes during the layer's backward pass: recomputed tensors, gradients of its widest tensors, and
        gathered inputs."""
        # Gradients of the fc1 output and of the activation, and two gathered inputs (not split over TP).
        gradient = self.widest + (2 * self.wide * self.shape.hidden if self.tp > 1 else 0)
        if "full" in self.recompute:
            return self.every + gradient
        return self.every - self.kept + gradient if self.recompute else gradient

    @property
    def wide(self) -> int:
        return wide_bytes(self.precision)

    @property
    def linear(self) -> int:
        """Bytes per element of a matrix product's saved input. With FP8, FSDP programs (torchao) save the uncast input
        and cast it again in the backward pass."""
        return 1 if self.precision == "fp8" and self.engine != "fsdp" else self.wide

    @property
    def outer(self) -> float:
        """Fraction of the tensors outside the matrices that a rank holds."""
        return 1 / self.tp if self.tp > 1 and self.sequence_parallel else 1.0

    @property
    def inner(self) -> float:
        return 1 / self.tp

    @part
    def every(self) -> float:
        """Bytes of all tensors that a layer's backward pass needs."""
        shape, wide, linear, inner = self.shape, self.wide, self.linear, self.inner
        h, q, kv = shape.hidden, shape.q_width, shape.kv_width
        norm_inputs = 2 * wide * h * self.outer
        masks = 2 * h * self.outer if self.dropout else 0.0
        qk_norm = wide * (q + kv) * inner if shape.qk_norm else 0.0
        attention_output = (wide + (linear if linear < wide else 0)) * q * inner
        attention = wide * (q + 2 * kv) * inner + qk_norm + attention_output
        return norm_inputs + self.norm_outputs + masks + attention + self.fc1 + self.act

    @part
    def norm_outputs(self) -> float:
        return 2 * self.linear * self.shape.hidden * self.outer

    @part
    def fc1(self) -> float:
        """Bytes of the fc1 output and, for experts, of the permuted input. Routing is balanced: a rank has as many
        (token, expert) pairs as its share of the tokens. With ETP it has the pairs of its group, each with a part of
        the expert."""
        shape, gates = self.shape, self.shape.mlp_matrices - 1
        if not shape.experts:
            return self.wide * gates * shape.ffn * self.inner
        picked = shape.experts_per_token * self.inner
        return (self.wide * gates * shape.shared_ffn * self.inner
                + (self.wide * gates * shape.moe_ffn * picked + self.linear * shape.hidden * picked * self.etp))

    @part
    def act(self) -> float:
        """Bytes of the activation output."""
        shape = self.shape
        if not shape.experts:
            return self.linear * shape.ffn * self.inner
        picked = shape.experts_per_token * self.inner
        return self.linear * shape.shared_ffn * self.inner + self.linear * shape.moe_ffn * picked

    @part
    def widest(self) -> float:
        """Bytes of gradients during the MLP's backward pass."""
        shape = self.shape
        width = shape.moe_ffn * shape.experts_per_token + shape.shared_ffn if shape.experts else shape.ffn
        return self.wide * shape.mlp_matrices * width * self.inner


@lru_cache(maxsize=4096)
def layer_activations(shape: Architecture, tp: int, sequence_parallel: bool, precision: str, recompute: tuple[str, ...],
                      engine: TrainerEngine = "megatron", dropout: bool = False, etp: int = 1) -> LayerActivations:
    """See `LayerActivations`. Cached."""
    return LayerActivations(shape, tp, sequence_parallel, precision, recompute, engine, dropout, etp)


def in_flight(stage: int, pp: int, vpp: int, micro_batches: int) -> int:
    """Number of model chunks of a rank with live activations.

    1F1B: min(m, PP - i). Interleaved: min(m v, 2 (PP - i - 1) + (v - 1) PP + 1), where a chunk is a v-th of the stage's
    layers (Narayanan et al., arXiv 2104.04473, section 2.2, with Megatron's warm-up).
    """
    if vpp == 1:
        return min(micro_batches, pp - stage)
    return min(micro_batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
