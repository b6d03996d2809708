"""Parameter counts: exact, of a layer, of a model, and of what one training rank holds; and the FLOPs they cost.

    layer      attention 2 h q + 2 h kv, MLP 3 h ffn (SwiGLU) or 2 h ffn, router E h, experts 3 E h ffn_e, norms,
               biases
    model      L layers, embedding V h, head V h unless tied, final norm
    rank       matrices and their output biases / TP, experts / (EP x ETP), norms on every TP rank
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from launch.config.auto import round_up
from launch.model.shape import VOCAB_MULTIPLE, ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import TrainingLayout, stage_layers

FlopsConvention = Literal["noncausal", "causal", "no_attention", "lora_no_attention", "causal_lora",
                          "noncausal_with_full_recompute"]


class LayerParameters(NamedTuple):
    """Parameters of one transformer layer, by how they are split."""

    attention: int
    """The q, k, v and o matrices: over TP."""
    mlp: int
    """The dense MLP, or the shared experts: over TP."""
    experts: int
    """All routed experts: over EP."""
    split: int
    """Biases of column-parallel matrices: over TP."""
    replicated: int
    """Norms, biases of row-parallel matrices, the router: on every TP rank."""


class StageParameters(NamedTuple):
    """Parameters of one training rank, of one pipeline stage."""

    layers: int
    """Of its layers, experts left out."""
    experts: int
    """Routed experts; sharded by the optimizer over fewer ranks than the rest."""
    embedding: int
    """Padded; a tied head on the last stage is the second copy."""
    head: int
    """Head (padded) and final norm."""

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.layers + self.embedding + self.head

    @property
    def total(self) -> int:
        return self.layers + self.experts + self.embedding + self.head


@lru_cache(maxsize=256)
def layer(shape: ModelShape) -> LayerParameters:
    """One layer, unsplit."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    dense_width = shape.shared_ffn if shape.experts else shape.ffn
    fc1_width = (shape.mlp_matrices - 1) * dense_width
    split = q + 2 * kv if shape.qkv_bias or shape.all_biases else 0
    replicated = 2 * h + (2 * shape.head_dim if shape.qk_norm else 0) + shape.experts * h
    if shape.all_biases:
        split += fc1_width
        replicated += 2 * h + 2 * h          # of the two norms, of the o and fc2 matrices
    return LayerParameters(
        attention=2 * h * q + 2 * h * kv, mlp=shape.mlp_matrices * h * dense_width,
        experts=shape.experts * shape.mlp_matrices * h * shape.moe_ffn, split=split, replicated=replicated)


@lru_cache(maxsize=256)
def count(shape: ModelShape) -> int:
    """Parameters of the whole model; a tied head counts once."""
    embeddings = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    final_norm = (2 if shape.all_biases else 1) * shape.hidden
    return shape.layers * sum(layer(shape)) + embeddings + shape.learned_positions * shape.hidden + final_norm


@lru_cache(maxsize=256)
def matrix_parameters(shape: ModelShape) -> int:
    """Matrix elements that a token is multiplied with: head included, input embedding left out, of the experts those
    that the router picks. Twice this are the FLOPs of a forward pass without attention."""
    each, h = layer(shape), shape.hidden
    active = each.attention + each.mlp
    if shape.experts:
        active += each.experts // shape.experts * shape.experts_per_token + shape.experts * h
    return shape.layers * active + shape.vocab * h


def active_parameters(shape: ModelShape) -> int:
    """Parameters of the model less the experts that a token does not visit."""
    idle = layer(shape).experts // shape.experts * (shape.experts - shape.experts_per_token) if shape.experts else 0
    return count(shape) - shape.layers * idle


@lru_cache(maxsize=256)
def tensor_count(shape: ModelShape) -> int:
    """Tensors of the Hugging Face checkpoint, which a per-tensor path loops over: q, k, v and o apart, each expert's
    matrices apart, a tied head not stored."""
    biases = 1 if shape.all_biases else 0
    attention = 4 * (1 + biases) + (3 if shape.qkv_bias and not biases else 0) + (2 if shape.qk_norm else 0)
    dense_width = shape.shared_ffn if shape.experts else shape.ffn
    mlp = shape.mlp_matrices * (1 + biases) if dense_width else 0
    routed = shape.experts * shape.mlp_matrices + 1 if shape.experts else 0         # and the router
    norm = 1 + biases
    ends = 1 + (0 if shape.tied else 1) + (1 if shape.learned_positions else 0) + norm
    return shape.layers * (attention + mlp + routed + 2 * norm) + ends


def lora_count(shape: ModelShape, rank: int, book: Book = NO_BOOK) -> int:
    """LoRA parameters of the whole model: A [rank, in] and B [out, rank] of q, k, v, o and the dense MLP's matrices (Hu
    et al., arXiv 2106.09685); routed experts have none."""
    h, q, kv = shape.hidden, shape.q_width, shape.kv_width
    width = shape.shared_ffn if shape.experts else shape.ffn
    mlp = shape.mlp_matrices * (h + width) if width else 0
    return book.computed("parameters.adapters", shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + mlp), "parameters",
                         "L r (in + out) of q, k, v, o and the MLP's matrices",
                         ("model.lora_rank", *_keys("layers", "hidden", "heads", "kv_heads", "head_dim", *(
                             ("mlp_matrices",) if width else ()), "shared_ffn" if shape.experts else "ffn")))


def flops_per_token(shape: ModelShape, attention_length: float, causal: bool = True, *,
                    convention: FlopsConvention | None = None, book: Book = NO_BOOK) -> float:
    """FLOPs of training one token: 6 M + 6 L A l, with A = heads x head_dim; 12 L A l where not causal.

    Args:
        attention_length: E[t^2] / E[t] over the sequences of length t that attend to themselves only; the length
            itself where all are equal.
        causal: count the half of the attention matrix that causal kernels compute.
        convention: one of the published conventions instead (benchmarks/measured/README.md), to compare with figures
            that follow it.
    """
    matrices = matrix_parameters(shape)
    attention = shape.layers * shape.q_width * attention_length
    head = shape.vocab * shape.hidden
    kind = convention or ("causal" if causal else "noncausal")
    value = {"noncausal": 6.0 * matrices + 12 * attention,
             "causal": 6.0 * matrices + 6 * attention,
             "no_attention": 6.0 * matrices,
             "lora_no_attention": 4.0 * matrices,
             "causal_lora": (6.0 * matrices + 6 * attention) * 2 / 3,
             "noncausal_with_full_recompute": (6.0 * (matrices - head) + 12 * attention) * 4 / 3 + 6.0 * head}[kind]
    if book.keeps:
        book.computed("parameters.matrices", matrices, "", "L (2 h q + 2 h kv + 3 h ffn) + V h; of experts, k",
                      _keys("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "mlp_matrices", *(
                          ("experts", "experts_per_token", "moe_ffn", "shared_ffn") if shape.experts else ("ffn",))))
        book.computed("parameters.flops_per_token", value, "FLOP", "6 M + 6 L A l (training, causal, no recompute)",
                      ("parameters.matrices", *_keys("layers", "heads", "head_dim"), "work.attention_length"))
    return value


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Rows of the embedding as Megatron shards it: a multiple of 128 TP."""
    return round_up(shape.vocab, VOCAB_MULTIPLE * tp)


def stage_parameters(shape: ModelShape, layout: TrainingLayout, *,
                     book: Book = NO_BOOK) -> tuple[StageParameters, ...]:
    """What one rank of each pipeline stage holds.

    A tied embedding is held at both ends where PP > 1.
    """
    stages = _stages(shape, layout.tp, layout.ep * layout.etp, stage_layers(shape, layout))
    if book.keeps:
        write(shape, layout, stages, book)
    return stages


@lru_cache(maxsize=4096)
def _stages(shape: ModelShape, tp: int, expert_parts: int,
            layers: tuple[int, ...]) -> tuple[StageParameters, ...]:
    each = layer(shape)
    on_rank = (each.attention + each.mlp + each.split) // tp + each.replicated
    rows = padded_vocab(shape, tp) // tp * shape.hidden
    norm = (2 if shape.all_biases else 1) * shape.hidden
    last = len(layers) - 1
    stages = []
    for stage, number in enumerate(layers):
        second_copy = shape.tied and last > 0
        head = (0 if shape.tied and not second_copy else rows) + norm if stage == last else 0
        embedding = rows + shape.learned_positions * shape.hidden if stage == 0 else 0
        stages.append(StageParameters(number * on_rank, number * each.experts // expert_parts, embedding, head))
    return tuple(stages)


def write(shape: ModelShape, layout: TrainingLayout, stages: tuple[StageParameters, ...], book: Book) -> None:
    """The counts, for the book."""
    attention = _keys("hidden", "heads", "kv_heads", "head_dim", "qkv_bias", "qk_norm", "all_biases")
    sizes = attention + _keys("mlp_matrices", *(("experts", "shared_ffn") if shape.experts else ("ffn",)))
    dense = sizes if not shape.experts or shape.shared_ffn else attention + _keys("experts", "shared_ffn")
    each, last = layer(shape), len(stages) - 1
    on_rank = (each.attention + each.mlp + each.split) // layout.tp + each.replicated
    rows = padded_vocab(shape, layout.tp) // layout.tp * shape.hidden
    book.computed("parameters.layer", sum(each), "", "2 h (n_h + n_kv) d + 3 h ffn + 2 h (+ biases, experts)",
                  sizes + (_keys("moe_ffn") if shape.experts else ()))
    book.computed("parameters.model", count(shape), "", "L x layer + V h (twice unless tied) + h", (
        "parameters.layer", *_keys("layers", "hidden", "vocab", "tied", "learned_positions", "all_biases")))
    book.computed("parameters.layer_on_rank", on_rank, "",
                  "(matrices + their biases)/TP + norms and router, of one layer on one rank, experts left out",
                  (*dense, "trainer.tp"))
    book.computed("parameters.embedding_on_rank", rows, "", "V, padded to a multiple of 128 TP, x h / TP",
                  (*_keys("vocab", "hidden"), "trainer.tp"))
    if shape.experts:
        book.computed("parameters.layer_experts_on_rank", each.experts // (layout.ep * layout.etp), "",
                      "E 3 h ffn_e / (EP x ETP)",
                      (*_keys("experts", "hidden", "moe_ffn", "mlp_matrices"), "trainer.ep", "trainer.etp"))
    for number, (stage, held) in enumerate(zip(stages, stage_layers(shape, layout))):
        key = f"parameters.stage{number}"
        uneven = ("trainer.vpp",) if shape.layers % layout.pp else ()
        split = ("trainer.layers_of_stage",) if layout.layers_of_stage else ("model.layers", "trainer.pp", *uneven)
        book.computed(f"{key}.layers", held, "", "layers of this stage", split)
        ends = ["parameters.embedding_on_rank", "trainer.pp"] if number in (0, last) else ["trainer.pp"]
        ends += _keys("hidden", "learned_positions") if number == 0 else ()
        ends += _keys("hidden", "all_biases") if number == last else ()
        ends += _keys("tied") if last == 0 else ()         # with a pipeline a tied head is a second copy
        book.computed(f"{key}.dense", stage.dense, "",
                      "layers x layer on a rank (first stage + embedding, last + head and final norm)",
                      dict.fromkeys((f"{key}.layers", "parameters.layer_on_rank", *ends)))
        if shape.experts:
            book.computed(f"{key}.experts", stage.experts, "", "layers x experts of a layer on a rank",
                          (f"{key}.layers", "parameters.layer_experts_on_rank"))


def _keys(*names: str) -> tuple[str, ...]:
    """Book keys of fields of the shape."""
    return tuple(f"model.{name}" for name in names)
