"""The layout of every Megatron-core parameter of a rank, as tiles of Hugging Face tensors. Pure integers.

Covers `GPTModel` for Llama, Qwen2 and Qwen3 (dense) under tensor, pipeline and virtual pipeline parallelism. Data- and
context-parallel ranks hold the same parameters as their peers. Megatron's storage differs from Hugging Face's as
follows:

- `linear_qkv` is fused by query group: the query heads of each KV head, then its key, then its value;
- `linear_fc1` is [gate; up] of this rank's slice, not a slice of [gate; up];
- the vocabulary is padded to `TrainingPlan.padded_vocab`, and no tile contains the padded rows;
- layers are numbered from 0 within each pipeline chunk;
- with tied embeddings and PP > 1, the last stage holds a second copy of the embedding as `output_layer.weight`;
- Transformer Engine fuses the norm into the linear layer after it, which renames the norm's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from launch.model.architecture import Architecture, tensor_shapes
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile, contiguous_stride

Implementation = Literal["local", "transformer_engine"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


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


class _Stage:
    """The parameters of one tensor-parallel rank, for any pipeline stage."""

    def __init__(self, architecture: Architecture, training: TrainingPlan, tp_rank: int,
                 implementation: Implementation) -> None:
        self.a, self.tp, self.t = architecture, training.tp, tp_rank
        self.vocab_rows = training.padded_vocab // training.tp
        fused = implementation == "transformer_engine"
        self.input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
        self.mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"

    def chunk(self, layers: tuple[int, ...], first: bool, last: bool) -> Iterator[ParamLayout]:
        if first:
            yield self._vocabulary("embedding.word_embeddings.weight", EMBEDDING)
        for local, layer in enumerate(layers):
            for name, shape, tiles in self._layer(f"model.layers.{layer}."):
                yield ParamLayout(f"decoder.layers.{local}.{name}", shape, tiles)
        if last:
            yield ParamLayout("decoder.final_layernorm.weight", (self.a.hidden,), _whole(FINAL_NORM, self.a.hidden))
        if last and not self.a.tied_embeddings:
            yield self._vocabulary("output_layer.weight", HEAD)
        elif last and not first:
            yield self._vocabulary("output_layer.weight", EMBEDDING)

    def _vocabulary(self, name: str, tensor: str) -> ParamLayout:
        hidden, start = self.a.hidden, self.t * self.vocab_rows
        rows = min(self.vocab_rows, self.a.vocab - start)
        tiles = (Tile(tensor, (start, 0), (rows, hidden), (hidden, 1), 0),) if rows > 0 else ()
        return ParamLayout(name, (self.vocab_rows, hidden), tiles)

    def _layer(self, hf: str) -> Iterator[tuple[str, tuple[int, ...], tuple[Tile, ...]]]:
        a, attention = self.a, "self_attention."
        qkv_rows = (a.heads + 2 * a.kv_heads) * a.head_dim // self.tp
        yield self.input_norm, (a.hidden,), _whole(f"{hf}input_layernorm.weight", a.hidden)
        yield f"{attention}linear_qkv.weight", (qkv_rows, a.hidden), self._qkv(f"{hf}self_attn.", "weight")
        if a.qkv_bias:
            yield f"{attention}linear_qkv.bias", (qkv_rows,), self._qkv(f"{hf}self_attn.", "bias")
        if a.qk_norm:
            for p in "qk":
                yield (f"{attention}{p}_layernorm.weight", (a.head_dim,),
                       _whole(f"{hf}self_attn.{p}_norm.weight", a.head_dim))
        yield (f"{attention}linear_proj.weight", *self._columns(f"{hf}self_attn.o_proj.weight", a.heads * a.head_dim))
        yield self.mlp_norm, (a.hidden,), _whole(f"{hf}post_attention_layernorm.weight", a.hidden)
        yield "mlp.linear_fc1.weight", (2 * a.ffn // self.tp, a.hidden), self._gate_up(f"{hf}mlp.")
        yield ("mlp.linear_fc2.weight", *self._columns(f"{hf}mlp.down_proj.weight", a.ffn))

    def _qkv(self, hf: str, kind: str) -> tuple[Tile, ...]:
        """Rows by query group [q .. q, k, v] (Megatron's `SelfAttention.get_query_key_value_tensors`)."""
        d = self.a.head_dim
        queries, groups = self.a.heads // self.a.kv_heads, self.a.kv_heads // self.tp
        tiles, row = [], 0
        for group in range(self.t * groups, (self.t + 1) * groups):
            for projection, heads in (("q", queries), ("k", 1), ("v", 1)):
                tiles.append(self._rows(f"{hf}{projection}_proj.{kind}", group * heads * d, heads * d, row))
                row += heads * d
        return tuple(tiles)

    def _gate_up(self, hf: str) -> tuple[Tile, ...]:
        rows = self.a.ffn // self.tp
        return tuple(self._rows(f"{hf}{half}_proj.weight", self.t * rows, rows, at)
                     for half, at in (("gate", 0), ("up", rows)))

    def _rows(self, tensor: str, start: int, rows: int, local_row: int) -> Tile:
        """`rows` whole rows of a weight [*, hidden], or elements of a bias, at row `local_row` of the parameter."""
        if tensor.endswith(".bias"):
            return Tile(tensor, (start,), (rows,), (1,), local_row)
        hidden = self.a.hidden
        return Tile(tensor, (start, 0), (rows, hidden), (hidden, 1), local_row * hidden)

    def _columns(self, tensor: str, columns: int) -> tuple[tuple[int, ...], tuple[Tile, ...]]:
        """A row-parallel weight [hidden, columns]: this rank's slice of the columns."""
        shape = (self.a.hidden, columns // self.tp)
        return shape, (Tile(tensor, (0, self.t * shape[1]), shape, contiguous_stride(shape), 0),)


def _whole(tensor: str, size: int) -> tuple[Tile, ...]:
    return (Tile(tensor, (0,), (size,), (1,), 0),)
