"""From a Hugging Face `config.json` to an `Architecture`, with the json module only: no transformers, no network.

Everything that changes the numbers and is not modelled is refused here by name. A model that is loaded although its
rope, window or biases are not understood trains without an error and is wrong.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from launch.errors import UserError

FAMILIES: dict[str, Literal["llama", "qwen2", "qwen3"]] = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The rope types that are modelled, and what each needs besides `rope_theta`."""


def from_hf_config(folder: str | Path) -> Architecture:
    """Read `folder/config.json`.

    Understands Llama, Qwen2/2.5 and Qwen3 dense, with `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (older files).

    Raises:
        UserError: no such folder or file, not JSON, a field that is missing or of the wrong type, an architecture or
            a feature that is not supported (experts, sliding window, quantised weights, other rope types).
    """
    return from_hf_dict(read_hf_config(folder), str(Path(folder) / "config.json"))


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The content of `folder/config.json`.

    Raises:
        UserError: no such folder or file, not JSON.
    """
    return _read(Path(folder) / "config.json")


def from_hf_dict(config: dict[str, Any], where: str = "config.json") -> Architecture:
    """The same from the parsed content of a config.json; `where` names it in messages."""
    fields = _Fields(config, where)
    family = _family(fields)
    _refuse_unmodelled(fields, family)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    # Llama takes absent KV heads for "as many as heads"; the default of Qwen's classes suits no published model.
    kv_heads = fields.integer("num_key_value_heads", default=heads if family == "llama" else None)
    head_dim = fields.integer("head_dim", default=128 if family == "qwen3" else hidden // heads)
    if heads % kv_heads:
        raise UserError(f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}",
                        where=where, fix="restore the model's own config.json")
    if config.get("head_dim") is None and family != "qwen3" and hidden % heads:
        raise UserError(f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads} and there is no "
                        f"head_dim", where=where, fix="restore the model's own config.json")
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim} is odd: rotary embeddings turn pairs", where=where,
                        fix="restore the model's own config.json")
    return Architecture(
        family=family, layers=fields.integer("num_hidden_layers"), hidden=hidden,
        ffn=fields.integer("intermediate_size"), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=fields.integer("vocab_size"), tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3", norm_eps=fields.number("rms_norm_eps"),
        max_positions=fields.integer("max_position_embeddings"),
        initializer_range=fields.number("initializer_range", default=0.02), rope=_rope(fields))


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the Hugging Face checkpoint, in its order; tied embeddings have no
    `lm_head.weight`. The one place that knows them: model folders are checked, loaded, exported and synced by it."""
    before, after = _outer_shapes(architecture)
    layer = _layer_shapes(architecture)
    return before | {f"model.layers.{number}.{name}": shape for number in range(architecture.layers)
                     for name, shape in layer.items()} | after


def parameter_count(architecture: Architecture) -> int:
    """Exact number of parameters; tied embeddings count once."""
    before, after = _outer_shapes(architecture)
    layer = sum(map(prod, _layer_shapes(architecture).values()))
    return architecture.layers * layer + sum(map(prod, (before | after).values()))


def _outer_shapes(a: Architecture) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """The tensors before and after the layers."""
    after: dict[str, tuple[int, ...]] = {"model.norm.weight": (a.hidden,)}
    if not a.tied_embeddings:
        after["lm_head.weight"] = (a.vocab, a.hidden)
    return {"model.embed_tokens.weight": (a.vocab, a.hidden)}, after


def _layer_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, a.hidden),
        "self_attn.k_proj.weight": (kv, a.hidden),
        "self_attn.v_proj.weight": (kv, a.hidden),
        "self_attn.o_proj.weight": (a.hidden, q),
        **_mlp_shapes(a),
        "input_layernorm.weight": (a.hidden,),
        "post_attention_layernorm.weight": (a.hidden,),
    }
    if a.qkv_bias:
        shapes |= {f"self_attn.{p}_proj.bias": (rows,) for p, rows in zip("qkv", (q, kv, kv))}
    if a.qk_norm:
        shapes |= {f"self_attn.{p}_norm.weight": (a.head_dim,) for p in "qk"}
    return shapes


def _mlp_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    def matrices(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{prefix}.gate_proj.weight": (width, a.hidden), f"{prefix}.up_proj.weight": (width, a.hidden),
                f"{prefix}.down_proj.weight": (a.hidden, width)}

    if not a.experts:
        return matrices("mlp", a.ffn)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (a.experts, a.hidden)}
    for expert in range(a.experts):
        shapes |= matrices(f"mlp.experts.{expert}", a.moe_ffn)
    return shapes


class _Fields:
    """Typed access to a config.json; every failure names the field, the value and the file."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{name} is missing", where=self.where, fix="restore the model's own config.json")
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{name} = {value!r} is not {expected}", where=self.where,
                         fix="restore the model's own config.json")


def _read(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise UserError(f"no model folder {file.parent}", where=str(file.parent.absolute()),
                        fix="set model.path to a Hugging Face model folder; nothing is downloaded")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file.parent} holds no config.json", where=str(file.absolute()),
                        fix="set model.path to a folder with config.json, safetensors and tokenizer") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", where=str(file.absolute()),
                        fix="make it readable") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}", where=str(file.absolute()),
                        fix="the file is damaged or cut short: copy it again") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds no JSON object", where=str(file.absolute()), fix="copy the model's own file")
    return config


def _family(fields: _Fields) -> Literal["llama", "qwen2", "qwen3"]:
    names = fields.config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise UserError(f"architectures = {names!r} does not name one architecture", where=fields.where,
                        fix=f"supported: {', '.join(FAMILIES)}")
    if not isinstance(names[0], str) or names[0] not in FAMILIES:
        raise UserError(f"architecture {names[0]!r} is not supported", where=fields.where,
                        fix=f"use a model of {', '.join(FAMILIES)}")
    family = FAMILIES[names[0]]
    model_type = fields.config.get("model_type", family)
    if model_type != family:
        raise UserError(f"model_type = {model_type!r} does not belong to {names[0]}", where=fields.where,
                        fix="restore the model's own config.json")
    return family


def _refuse_unmodelled(fields: _Fields, family: str) -> None:
    config = fields.config

    def refuse(name: str, what: str, fix: str) -> None:
        raise UserError(f"{name} = {config[name]!r}: {what}", where=fields.where, fix=fix)

    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name):
            refuse(name, "mixture-of-experts models are not supported", "use a dense model")
    if config.get("quantization_config"):
        refuse("quantization_config", "quantised weights cannot be trained", "use the bf16 or fp32 weights")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        refuse("layer_types", "only full attention is supported", "use a model without sliding windows")
    # Qwen2 files carry a window with use_sliding_window false; elsewhere a window alone switches it on.
    window_on = config.get("use_sliding_window", family == "llama" and bool(config.get("sliding_window")))
    if window_on:
        refuse("use_sliding_window" if "use_sliding_window" in config else "sliding_window",
               "sliding-window attention is not supported", "use a model with full attention")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            refuse(name, f"{family} with these biases is not supported", "use a model without them")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "only silu (SwiGLU) is supported", "use a model with silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", "partial rotary embeddings are not supported", "use a model with full rope")


def _rope(fields: _Fields) -> dict[str, Any]:
    """`rope_parameters` in one form: `rope_type`, `rope_theta` and what the type needs, keys sorted."""
    config = fields.config
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"rope_parameters = {given!r} is not an object", where=fields.where,
                        fix="restore the model's own config.json")
    rope = _Fields({"rope_theta": config.get("rope_theta"), **given}, f"{fields.where}, rope parameters")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(f"rope type {kind!r} is not supported", where=fields.where,
                        fix=f"use a model with rope type {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor = {given['partial_rotary_factor']!r} is not supported",
                        where=fields.where, fix="use a model with full rope")
    # 10000 is what Hugging Face takes for an absent rope_theta (Llama 1 and 2 files have none).
    result: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.number("rope_theta", default=10000.0)}
    for name in ROPE_TYPES[kind]:
        result[name] = rope.integer(name) if name.startswith("original") else rope.number(name)
    return dict(sorted(result.items()))


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class Architecture(Frozen):
    """What planning, Megatron and the layouts need to know of a Hugging Face config; built by
    `launch.model.architecture.from_hf_config`."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
    """`qwen3_moe` can be planned; the trainer runs dense models."""
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int
    initializer_range: float
    rope: dict
    """Hugging Face's `rope_parameters`: rope_type, rope_theta and what the type needs."""
    experts: int = 0
    """Routed experts of every layer; 0: a dense model."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Width of one expert."""
