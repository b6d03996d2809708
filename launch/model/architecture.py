"""`Architecture`: the sizes and features of a decoder-only transformer, and the tensors of its layers. Parameter
counts, shapes, shards and tiles follow from the tensors.

`launch/model/families/` turns each family's config.json into an `Architecture`. No other code depends on the family.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict

VOCAB_MULTIPLE = 128
"""Megatron's `make_vocab_size_divisible_by`: it pads the vocabulary to a multiple of this times TP."""
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and features of a model. The planner accepts all of them; the trainer runs the models that a family in
    `launch/model/families/` reads. Heads x head_dim may differ from hidden (Qwen3-32B: 8192 and 5120)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    layers: int
    hidden: int
    ffn: int
    """Width of the dense MLP; unused where `experts` is set."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Unpadded."""
    tied: bool
    """The output head is the embedding. It is counted once and held twice with PP > 1."""
    mlp_matrices: int = 3
    """3 for SwiGLU, 2 for GELU and squared ReLU (published models only)."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head's query and key, before the rotary embedding."""
    qk_norm_whole: bool = False
    """With `qk_norm`: one norm over the whole query or key projection instead."""
    post_norm: bool = False
    """The norms are at the output of attention and MLP, before the residual is added, instead of at the input."""
    all_biases: bool = False
    """Every linear layer and norm has a bias (GPT-2 style; published models only)."""
    learned_positions: int = 0
    """Rows of the learned position embedding; 0 with rotary positions (published models only)."""
    experts: int = 0
    """Routed experts per layer; 0: a dense model."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Width of one expert."""
    shared_ffn: int = 0
    """Total width of the shared experts; 0: none."""
    family: str = ""
    """`model_type` of config.json; empty for a published model that no family reads."""
    norm_eps: float = 1e-5
    max_positions: int = 0
    initializer_range: float = 0.02
    rope: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE), hash=False)
    """Hugging Face's `rope_parameters`: rope_type, rope_theta and the parameters of the type."""
    names: dict[str, str] = field(default_factory=dict, hash=False)
    """Role -> name of a layer tensor in the checkpoint, if it differs from `NAMES`."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of K, which equals that of V."""
        return self.kv_heads * self.head_dim

    def engine_divides_kv_heads(self, tp: int) -> bool:
        """Whether vLLM can shard or replicate the KV heads over TP. It cannot replicate heads that share one norm,
        because it gathers them for the norm."""
        return self.kv_heads % tp == 0 or (tp % self.kv_heads == 0 and not self.qk_norm_whole)


Cut = Literal["", "heads", "kv_heads", "ffn", "experts"]

NAMES = {
    "input_norm": "input_layernorm.weight", "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight", "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight", "attention_output_norm": "post_attention_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight", "mlp_output_norm": "post_feedforward_layernorm.weight", "router": "mlp.gate.weight"}
"""Role of a layer tensor -> name in most Hugging Face checkpoints, below `model.layers.N.`. Experts are named
`mlp.experts.E.gate_proj.weight` and so on. `Architecture.names` overrides a name."""


class LayerTensor(NamedTuple):
    """One tensor of a layer."""

    role: str
    """A key of `NAMES`, or `expert_gate`, `expert_up` or `expert_down`."""
    shape: tuple[int, ...]
    cut: Cut = ""
    """The units that tensor parallelism divides: query heads, KV heads or columns of the MLP. `experts`: divided by
    expert parallelism. Empty: every rank holds the whole tensor."""
    axis: int = 0
    """Dimension of the cut."""

    @property
    def size(self) -> int:
        return prod(self.shape)


@lru_cache(maxsize=256)
def layer_tensors(a: Architecture) -> tuple[LayerTensor, ...]:
    """The tensors of one layer without routed experts (`expert_tensors`). The checkpoint's names and shapes, parameter
    counts, shards of the weight sync and Megatron's tiles are all derived from this description."""
    h, q, kv = a.hidden, a.q_width, a.kv_width
    width = a.shared_ffn if a.experts else a.ffn
    tensors = [LayerTensor("q", (q, h), "heads"), LayerTensor("k", (kv, h), "kv_heads"),
               LayerTensor("v", (kv, h), "kv_heads"), LayerTensor("o", (h, q), "heads", 1)]
    if a.qkv_bias or a.all_biases:
        tensors += [LayerTensor("q_bias", (q,), "heads"), LayerTensor("k_bias", (kv,), "kv_heads"),
                    LayerTensor("v_bias", (kv,), "kv_heads")]
    if a.qk_norm and a.qk_norm_whole:
        tensors += [LayerTensor("q_norm", (q,), "heads"), LayerTensor("k_norm", (kv,), "kv_heads")]
    elif a.qk_norm:
        tensors += [LayerTensor("q_norm", (a.head_dim,)), LayerTensor("k_norm", (a.head_dim,))]
    inner = ("gate", "up")[3 - a.mlp_matrices:]
    if width:
        tensors += [LayerTensor(role, (width, h), "ffn") for role in inner]
        tensors.append(LayerTensor("down", (h, width), "ffn", 1))
    if a.experts:
        tensors.append(LayerTensor("router", (a.experts, h)))
    norms = ("attention_output_norm", "mlp_output_norm") if a.post_norm else ("input_norm", "mlp_norm")
    tensors += [LayerTensor(role, (h,)) for role in norms]
    if a.all_biases:
        tensors += [*(LayerTensor(f"{role}_bias", (width,), "ffn") for role in inner if width),
                    *(LayerTensor(f"{role}_bias", (h,)) for role in ("o", "down", *norms))]
    return tuple(tensors)


@lru_cache(maxsize=256)
def expert_tensors(a: Architecture) -> tuple[LayerTensor, ...]:
    """The tensors of one routed expert; none in a dense model."""
    if not a.experts:
        return ()
    into, out = (a.moe_ffn, a.hidden), (a.hidden, a.moe_ffn)
    inner = ("gate", "up")[3 - a.mlp_matrices:]
    return (*(LayerTensor(f"expert_{role}", into, "experts") for role in inner),
            LayerTensor("expert_down", out, "experts", 1))


def tensor_name(a: Architecture, role: str) -> str:
    """Name of a layer tensor in the checkpoint, below `model.layers.N.`."""
    return a.names.get(role) or NAMES[role]


def tensor_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the Hugging Face checkpoint, in its order. Models with tied embeddings have no
    `lm_head.weight`. Checking, loading, export and sync of weights use this.

    Only for architectures that a family reads; tensors of others have no names here.
    """
    layer = {tensor_name(a, tensor.role): tensor.shape for tensor in layer_tensors(a)}
    for expert in range(a.experts):
        layer |= {f"mlp.experts.{expert}.{tensor.role.removeprefix('expert_')}_proj.weight": tensor.shape
                  for tensor in expert_tensors(a)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab, a.hidden)}
    for number in range(a.layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (a.hidden,)
    return shapes if a.tied else shapes | {"lm_head.weight": (a.vocab, a.hidden)}


def parameter_count(a: Architecture) -> int:
    """Exact number of parameters; tied embeddings count once."""
    layer = elements(layer_tensors(a)) + a.experts * elements(expert_tensors(a))
    ends = (1 if a.tied else 2) * a.vocab * a.hidden + a.learned_positions * a.hidden
    return a.layers * layer + ends + (2 if a.all_biases else 1) * a.hidden


def elements(tensors: Iterable[LayerTensor]) -> int:
    return sum(tensor.size for tensor in tensors)
