"""Exact parameter counts of a layer, a model and a training rank, and FLOPs per token.

    layer      attention 2 h q + 2 h kv, MLP 3 h ffn (SwiGLU) or 2 h ffn, router E h, experts 3 E h ffn_e, norms,
               biases
    model      L layers, embedding V h, head V h unless tied, final norm
    rank       matrices and their output biases / TP, experts / (EP x ETP), norms on every TP rank
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from launch.model.architecture import (
    VOCAB_MULTIPLE,
    Architecture,
    elements,
    expert_tensors,
    layer_tensors,
    parameter_count,
)
from launch.model.padding import round_up
from launch.plan.book import line, nonzero, part
from launch.plan.layouts import TrainingLayout, stage_layers

FlopsConvention = Literal["noncausal", "causal", "no_attention", "lora_no_attention", "causal_lora",
                          "noncausal_with_full_recompute"]


class LayerParameters(NamedTuple):
    """Parameters of one transformer layer, grouped by how they are split."""

    attention: int
    """The q, k, v and o matrices, split over TP."""
    mlp: int
    """The dense MLP or the shared experts, split over TP."""
    experts: int
    """All routed experts, split over EP."""
    split: int
    """Biases of column-parallel matrices, split over TP."""
    replicated: int
    """Norms, biases of row-parallel matrices and the router, on every TP rank."""


@lru_cache(maxsize=256)
def layer(shape: Architecture) -> LayerParameters:
    """Parameters of one layer before any split."""
    tensors = layer_tensors(shape)
    matrices = [tensor for tensor in tensors if len(tensor.shape) == 2]
    vectors = [tensor for tensor in tensors if len(tensor.shape) == 1]
    return LayerParameters(
        attention=elements(tensor for tensor in matrices if tensor.cut in ("heads", "kv_heads")),
        mlp=elements(tensor for tensor in matrices if tensor.cut == "ffn"),
        experts=shape.experts * elements(expert_tensors(shape)),
        split=elements(tensor for tensor in vectors if tensor.cut),
        replicated=elements(tensor for tensor in tensors if not tensor.cut))


@lru_cache(maxsize=256)
def count(shape: Architecture) -> int:
    """Parameters of the whole model. A tied head counts once."""
    return parameter_count(shape)


@lru_cache(maxsize=256)
def matrix_parameters(shape: Architecture) -> int:
    """Matrix elements that a token is multiplied with: the head and the experts that the router picks, but not the
    input embedding. A forward pass without attention takes twice as many FLOPs."""
    each, h = layer(shape), shape.hidden
    active = each.attention + each.mlp
    if shape.experts:
        active += each.experts // shape.experts * shape.experts_per_token + shape.experts * h
    return shape.layers * active + shape.vocab * h


@lru_cache(maxsize=256)
def tensor_count(shape: Architecture) -> int:
    """Number of tensors in the Hugging Face checkpoint, for code that loops over tensors. q, k, v and o are separate,
    as are the matrices of each expert. A tied head is not stored."""
    ends = 1 + (0 if shape.tied else 1) + (1 if shape.learned_positions else 0) + (2 if shape.all_biases else 1)
    return shape.layers * (len(layer_tensors(shape)) + shape.experts * len(expert_tensors(shape))) + ends


def lora_count(shape: Architecture, rank: int) -> int:
    """LoRA parameters of the whole model: A [rank, in] and B [out, rank] for q, k, v, o and the matrices of the dense
    MLP (Hu et al., arXiv 2106.09685). Routed experts have none."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    width = shape.shared_ffn if shape.experts else shape.ffn
    mlp = shape.mlp_matrices * (h + width) if width else 0
    return shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + mlp)


def flops_per_token(shape: Architecture, attention_length: float, causal: bool = True, *,
                    convention: FlopsConvention | None = None) -> float:
    """FLOPs of training one token: 6 M + 6 L A l with A = heads x head_dim, or 6 M + 12 L A l if not causal.

    Args:
        attention_length: E[t^2] / E[t] over sequences of length t that attend only to themselves; the length itself if
            all are equal.
        causal: count only the half of the attention matrix that causal kernels compute.
        convention: a published convention instead (benchmarks/measured/README.md), to compare with figures that use it.
    """
    matrices = matrix_parameters(shape)
    attention = shape.layers * shape.q_width * attention_length
    head = shape.vocab * shape.hidden
    kind = convention or ("causal" if causal else "noncausal")
    return {"noncausal": 6.0 * matrices + 12 * attention,
            "causal": 6.0 * matrices + 6 * attention,
            "no_attention": 6.0 * matrices,
            "lora_no_attention": 4.0 * matrices,
            "causal_lora": (6.0 * matrices + 6 * attention) * 2 / 3,
            "noncausal_with_full_recompute": (6.0 * (matrices - head) + 12 * attention) * 4 / 3 + 6.0 * head}[kind]


def padded_vocab(shape: Architecture, tp: int) -> int:
    """Rows of the embedding as Megatron shards it: a multiple of 128 x TP."""
    return round_up(shape.vocab, VOCAB_MULTIPLE * tp)


@dataclass(eq=False)
class RankParameters:
    """Parameters on the ranks of a training layout. With PP > 1, both end stages hold a tied embedding."""

    PREFIX = "parameters"

    shape: Architecture
    tp: int
    ep: int
    etp: int
    pp: int
    layers: tuple[int, ...]
    """Number of layers of each pipeline stage."""

    @line("", "2 h (n_h + n_kv) d + 3 h ffn + 2 h (+ biases, experts)")
    def layer(self) -> int:
        return sum(layer(self.shape))

    @line("", "L x layer + V h (twice unless tied) + h")
    def model(self) -> int:
        return count(self.shape)

    @line("", "(matrices + their biases)/TP + norms and router, of one layer on one rank, experts left out")
    @part
    def layer_on_rank(self) -> int:
        each = layer(self.shape)
        return (each.attention + each.mlp + each.split) // self.tp + each.replicated

    @line("", "V, padded to a multiple of 128 TP, x h / TP")
    @part
    def embedding_on_rank(self) -> int:
        return padded_vocab(self.shape, self.tp) // self.tp * self.shape.hidden

    @line("", "E 3 h ffn_e / (EP x ETP)", written=nonzero)
    def layer_experts_on_rank(self) -> int:
        return layer(self.shape).experts // (self.ep * self.etp)

    @part
    def stages(self) -> tuple[StageParameters, ...]:
        return tuple(StageParameters(self, number) for number in range(self.pp))


class TeacherParameters(RankParameters):
    """Parameters of the frozen teacher on the ranks of the policy's layout."""

    PREFIX = "teacher.parameters"


@dataclass(eq=False)
class StageParameters:
    """Parameters on one rank of a pipeline stage."""

    of: RankParameters
    number: int

    @property
    def PREFIX(self) -> str:
        return f"{self.of.PREFIX}.stage{self.number}"

    @line("", "layers of this stage")
    @part
    def layers(self) -> int:
        return self.of.layers[self.number]

    @line("", "layers x layer on a rank (first stage + embedding, last + head and final norm)")
    @part
    def dense(self) -> int:
        """All parameters except the routed experts."""
        return self.layers * self.of.layer_on_rank + self.embedding + self.head

    @line("", "layers x experts of a layer on a rank", written=nonzero)
    @part
    def experts(self) -> int:
        """Routed experts. The optimizer shards them over fewer ranks than the rest."""
        return self.layers * layer(self.of.shape).experts // (self.of.ep * self.of.etp) if self.of.shape.experts else 0

    @part
    def embedding(self) -> int:
        """The embedding with its padding."""
        if self.number > 0:
            return 0
        return self.of.embedding_on_rank + self.of.shape.learned_positions * self.of.shape.hidden

    @part
    def head(self) -> int:
        """The padded head and the final norm. A tied head on the last stage is a second copy."""
        shape, last = self.of.shape, self.of.pp - 1
        if self.number < last:
            return 0
        norm = (2 if shape.all_biases else 1) * shape.hidden
        return norm if last == 0 and shape.tied else self.of.embedding_on_rank + norm

    @part
    def total(self) -> int:
        return self.dense + self.experts


@lru_cache(maxsize=4096)
def rank_parameters(shape: Architecture, tp: int, ep: int, etp: int, pp: int,
                    layers: tuple[int, ...]) -> RankParameters:
    """See `RankParameters`. Cached, because a search asks for the same ones a thousand times."""
    return RankParameters(shape, tp, ep, etp, pp, layers)


@lru_cache(maxsize=4096)
def teacher_parameters(shape: Architecture, tp: int, ep: int, etp: int, pp: int,
                       layers: tuple[int, ...]) -> TeacherParameters:
    """See `TeacherParameters`. Cached as `rank_parameters`."""
    return TeacherParameters(shape, tp, ep, etp, pp, layers)


def parameters_of(shape: Architecture, layout: TrainingLayout) -> RankParameters:
    """Parameters on the ranks of a layout."""
    return rank_parameters(shape, layout.tp, layout.ep, layout.etp, layout.pp, stage_layers(shape, layout))
