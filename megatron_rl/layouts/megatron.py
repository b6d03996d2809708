"""The layout of every Megatron-core parameter of a rank, as tiles of Hugging Face tensors. Pure integers.

Covers `GPTModel` of every dense architecture that a family can read, under tensor, pipeline and virtual pipeline
parallelism. `launch.model.architecture.layer_tensors` describes what a layer holds and what TP splits. Data- and
context-parallel ranks hold the same parameters as their peers. Megatron's storage differs from Hugging Face's as
follows:

- `linear_qkv` is fused by query group: the query heads of each KV head, then its key, then its value;
- `linear_fc1` is [gate; up] of this rank's slice, not a slice of [gate; up];
- the vocabulary is padded to `TrainingPlan.padded_vocab`, and no tile contains the padded rows;
- layers are numbered from 0 within each pipeline chunk;
- with tied embeddings and PP > 1, the last stage holds a second copy of the embedding as `output_layer.weight`;
- Transformer Engine fuses the norm into the linear layer after it, which renames the norm's weight;
- the norm of an output lies in the module that adds it to the residual (`trainer.norms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from launch.model.architecture import Architecture, LayerTensor, layer_tensors, tensor_name, tensor_shapes
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile, contiguous_stride

Implementation = Literal["local", "transformer_engine"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

PARAMETERS: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_norm",),
    "self_attention.linear_qkv.weight": ("q", "k", "v"),
    "self_attention.linear_qkv.bias": ("q_bias", "k_bias", "v_bias"),
    "self_attention.q_layernorm.weight": ("q_norm",),
    "self_attention.k_layernorm.weight": ("k_norm",),
    "self_attention.linear_proj.weight": ("o",),
    "self_attn_bda.norm.weight": ("attention_output_norm",),
    "pre_mlp_layernorm.weight": ("mlp_norm",),
    "mlp.linear_fc1.weight": ("gate", "up"),
    "mlp.linear_fc2.weight": ("down",),
    "mlp_bda.norm.weight": ("mlp_output_norm",),
}
"""Megatron's parameters of a layer, and the roles of the tensors whose rows each of them stacks. Three tensors are q, k
and v, cut by query group."""
FUSED = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
         "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
"""Transformer Engine's names, where they differ."""


def canonical_tensors(architecture: Architecture) -> list[CanonicalTensor]:
    """The tensors of the Hugging Face checkpoint in its order. Tied embeddings have no `lm_head.weight`."""
    return [CanonicalTensor(name, shape) for name, shape in tensor_shapes(architecture).items()]


def megatron_layout(architecture: Architecture, training: TrainingPlan, rank: int,
                    implementation: Implementation) -> list[ParamLayout]:
    """The layout of every parameter of a training rank, in the model's order.

    Names include the virtual pipeline chunk: `chunk0.decoder.layers.0.self_attention.linear_qkv.weight`.

    Raises ValueError if the parallel sizes do not divide the architecture. The configuration's cross-checks refuse such
    a run much earlier.
    """
    _check_divisible(architecture, training)
    coordinates = training.ranks[rank]
    stage = _Stage(architecture, training, coordinates.tp, implementation)
    chunks = training.layers_of_stage[coordinates.pp]
    layouts: list[ParamLayout] = []
    for chunk, layers in enumerate(chunks):
        first = coordinates.pp == 0 and chunk == 0
        last = coordinates.pp == training.pp - 1 and chunk == len(chunks) - 1
        layouts += [ParamLayout(f"chunk{chunk}.{layout.name}", layout.shape, layout.tiles)
                    for layout in stage.chunk(layers, first, last)]
    return layouts


def _check_divisible(a: Architecture, training: TrainingPlan) -> None:
    for what, size in (("heads", a.heads), ("kv_heads", a.kv_heads), ("ffn", a.ffn),
                       ("padded_vocab", training.padded_vocab)):
        if size % training.tp:
            raise ValueError(f"trainer TP = {training.tp} does not divide {what} = {size}")
    if training.padded_vocab < a.vocab:
        raise ValueError(f"padded_vocab = {training.padded_vocab} is less than the vocabulary, {a.vocab}")
    held = [layer for stage in training.layers_of_stage for chunk in stage for layer in chunk]
    if sorted(held) != list(range(a.layers)):
        raise ValueError(f"layers_of_stage holds layers {sorted(held)}, the model has {a.layers}")


_Piece = tuple[LayerTensor, tuple[int, ...], tuple[int, ...]]
"""A tensor, and start and shape of a box of it."""


class _Stage:
    """The parameters of one tensor-parallel rank, for any pipeline stage."""

    def __init__(self, architecture: Architecture, training: TrainingPlan, tp_rank: int,
                 implementation: Implementation) -> None:
        self.a, self.tp, self.t = architecture, training.tp, tp_rank
        self.vocab_rows = training.padded_vocab // training.tp
        self.names = FUSED if implementation == "transformer_engine" else {}
        self.tensors = {tensor.role: tensor for tensor in layer_tensors(architecture)}
        if homeless := self.tensors.keys() - {role for roles in PARAMETERS.values() for role in roles}:
            raise ValueError(f"Megatron's layers here have no place for {', '.join(sorted(homeless))}")

    def chunk(self, layers: tuple[int, ...], first: bool, last: bool) -> Iterator[ParamLayout]:
        if first:
            yield self._vocabulary("embedding.word_embeddings.weight", EMBEDDING)
        for local, layer in enumerate(layers):
            for name, shape, tiles in self._layer(f"model.layers.{layer}."):
                yield ParamLayout(f"decoder.layers.{local}.{name}", shape, tiles)
        if last:
            whole = (Tile(FINAL_NORM, (0,), (self.a.hidden,), (1,), 0),)
            yield ParamLayout("decoder.final_layernorm.weight", (self.a.hidden,), whole)
        if last and not self.a.tied:
            yield self._vocabulary("output_layer.weight", HEAD)
        elif last and not first:
            yield self._vocabulary("output_layer.weight", EMBEDDING)

    def _vocabulary(self, name: str, tensor: str) -> ParamLayout:
        hidden, start = self.a.hidden, self.t * self.vocab_rows
        rows = min(self.vocab_rows, self.a.vocab - start)
        tiles = (Tile(tensor, (start, 0), (rows, hidden), (hidden, 1), 0),) if rows > 0 else ()
        return ParamLayout(name, (self.vocab_rows, hidden), tiles)

    def _layer(self, hf: str) -> Iterator[tuple[str, tuple[int, ...], tuple[Tile, ...]]]:
        for name, roles in PARAMETERS.items():
            tensors = [self.tensors[role] for role in roles if role in self.tensors]
            if not tensors:
                continue
            pieces = list(self._by_query_group(tensors) if len(roles) == 3 else map(self._mine, tensors))
            shape = (sum(box[0] for _, _, box in pieces), *pieces[0][2][1:])
            stride, tiles, row = contiguous_stride(shape), [], 0
            for tensor, start, box in pieces:
                tiles.append(Tile(hf + tensor_name(self.a, tensor.role), start, box, stride, row * stride[0]))
                row += box[0]
            yield self.names.get(name, name), shape, tuple(tiles)

    def _mine(self, tensor: LayerTensor) -> _Piece:
        """This TP rank's slice of a tensor; all of it where TP does not cut it."""
        if not tensor.cut:
            return tensor, (0,) * len(tensor.shape), tensor.shape
        extent = tensor.shape[tensor.axis] // self.tp
        start = tuple(self.t * extent if axis == tensor.axis else 0 for axis in range(len(tensor.shape)))
        return tensor, start, tuple(extent if axis == tensor.axis else n for axis, n in enumerate(tensor.shape))

    def _by_query_group(self, tensors: list[LayerTensor]) -> Iterator[_Piece]:
        """Rows of q, k and v by query group [q .. q, k, v] (Megatron's `SelfAttention.get_query_key_value_tensors`)."""
        groups, d = self.a.kv_heads // self.tp, self.a.head_dim
        for group in range(self.t * groups, (self.t + 1) * groups):
            for tensor, heads in zip(tensors, (self.a.heads // self.a.kv_heads, 1, 1), strict=True):
                rest = tensor.shape[1:]
                yield tensor, (group * heads * d, *(0 for _ in rest)), (heads * d, *rest)
