"""Reads a Hugging Face `config.json` into an `Architecture`, without transformers and without network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.family import RESTORE, Family, Fields, find, trainable

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported rope type -> its parameters besides `rope_theta`."""


def from_hf_config(folder: str | Path, *, planning: bool = False) -> Architecture:
    """Read `folder/config.json`, with `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older
    files).

    Args:
        planning: also accept models that can be planned but not trained (mixtures of experts).

    Raises:
        UserError: no such folder or file, not JSON, a missing field or one of the wrong type, an unsupported
            architecture or feature (sliding window, quantised weights, other rope types).
    """
    return from_hf_dict(_read(Path(folder) / "config.json"), str(Path(folder) / "config.json"), planning=planning)


def from_hf_dict(config: dict[str, Any], where: str = "config.json", *, planning: bool = False) -> Architecture:
    """As `from_hf_config`, from the parsed content of a config.json. `where` is its place in messages."""
    fields = Fields(config, where)
    family = _family(fields, planning)
    own = dict(family.read(fields))
    _refuse_unmodelled(fields, family, biases="qkv_bias" in own)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = own.pop("kv_heads", None) or fields.integer("num_key_value_heads")
    head_dim = own.pop("head_dim", None) or _head_dim(fields, hidden, heads)
    if heads % kv_heads:
        raise UserError(f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}",
                        where=where, fix=RESTORE)
    if head_dim % 2:
        raise UserError(f"head_dim = {head_dim} is odd, but rotary embeddings rotate pairs", where=where, fix=RESTORE)
    return Architecture(
        family=family.model_type, layers=fields.integer("num_hidden_layers"), hidden=hidden,
        ffn=fields.integer("intermediate_size"), heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=fields.integer("vocab_size"), tied=fields.boolean("tie_word_embeddings", default=False),
        norm_eps=fields.number("rms_norm_eps"), max_positions=fields.integer("max_position_embeddings"),
        initializer_range=fields.number("initializer_range", default=0.02), rope=_rope(fields), **own)


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.config.get("head_dim") is None and hidden % heads:
        raise UserError(f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and head_dim is "
                        f"missing", where=fields.where, fix=RESTORE)
    return fields.integer("head_dim", default=hidden // heads)


def _family(fields: Fields, planning: bool) -> Family:
    names = fields.config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise UserError(f"architectures = {names!r} does not name one architecture", where=fields.where,
                        fix=f"supported: {', '.join(trainable())}")
    family = find(names[0], fields.where)
    if not family.trains and not planning:
        raise UserError(f"architecture {names[0]!r} can be planned, but not trained", where=fields.where,
                        fix=f"use a model of {', '.join(trainable())}")
    model_type = fields.config.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise UserError(f"model_type = {model_type!r} does not belong to {names[0]}", where=fields.where, fix=RESTORE)
    return family


def _refuse_unmodelled(fields: Fields, family: Family, biases: bool) -> None:
    """Refuse features that no family models. `biases`: the family reads the attention biases itself."""
    config = fields.config
    if family.trains:
        fields.refuse_if_set("mixture-of-experts models are not supported", "use a dense model", "num_experts",
                             "num_local_experts", "n_routed_experts")
    fields.refuse_if_set("quantised weights cannot be trained", "use the bf16 or fp32 weights", "quantization_config")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        fields.refuse("layer_types", "only full attention is supported", "use a model without sliding windows")
    if config.get("use_sliding_window", bool(config.get("sliding_window")) and not family.window_has_switch):
        fields.refuse("use_sliding_window" if "use_sliding_window" in config else "sliding_window",
                      "sliding-window attention is not supported", "use a model with full attention")
    fields.refuse_if_set(f"{family.model_type} with these biases is not supported", "use a model without them",
                         *(() if biases else ("attention_bias",)), "mlp_bias")
    if config.get("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", "only silu (SwiGLU) is supported", "use a model with silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        fields.refuse("partial_rotary_factor", "partial rotary embeddings are not supported",
                      "use a model with full rope")


def _rope(fields: Fields) -> dict[str, Any]:
    """`rope_parameters` in one form: `rope_type`, `rope_theta` and the parameters of the type, keys sorted."""
    config = fields.config
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise UserError(f"rope_parameters = {given!r} is not an object", where=fields.where, fix=RESTORE)
    rope = Fields({"rope_theta": config.get("rope_theta"), **given}, f"{fields.where}, rope parameters")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UserError(f"rope type {kind!r} is not supported", where=fields.where,
                        fix=f"use a model with rope type {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"partial_rotary_factor = {given['partial_rotary_factor']!r} is not supported",
                        where=fields.where, fix="use a model with full rope")
    # Hugging Face's default for an absent rope_theta is 10000 (Llama 1 and 2 files have none).
    result: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.number("rope_theta", default=10000.0)}
    for name in ROPE_TYPES[kind]:
        result[name] = rope.integer(name) if name.startswith("original") else rope.number(name)
    return dict(sorted(result.items()))


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
        raise UserError(f"{file} is not a JSON object", where=str(file.absolute()), fix="copy the model's own file")
    return config
