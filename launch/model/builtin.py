"""The shapes of published models, by name, and `ModelShape` from what the trainer runs or a model folder.

Sizes are those of the Hugging Face `config.json` of the repository named in each row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launch.errors import UserError, nearest_few
from launch.model.architecture import Architecture, from_hf_dict, read_hf_config
from launch.model.shape import ModelShape

LLAMA3_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA31_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_theta": 500_000.0, "rope_type": "llama3"}
QWEN_ROPE = {"rope_theta": 1_000_000.0, "rope_type": "default"}


@dataclass(frozen=True, slots=True)
class Builtin:
    """A row of the table: what `Architecture` holds, and the experts that it does not know."""

    source: str
    """Hugging Face repository whose config.json the row repeats."""
    family: Literal["llama", "qwen2", "qwen3"]
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    norm_eps: float = 1e-6
    max_positions: int = 32768
    rope: dict[str, Any] = field(default_factory=lambda: dict(QWEN_ROPE))
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0


def _llama(source: str, layers: int, hidden: int, ffn: int, heads: int, **other: Any) -> Builtin:
    values = {"kv_heads": 8, "vocab": 128256, "norm_eps": 1e-5, "max_positions": 131072, "rope": LLAMA31_ROPE} | other
    return Builtin(f"meta-llama/{source}", "llama", layers, hidden, ffn, heads, **values)


def _qwen2(size: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **other: Any) -> Builtin:
    return Builtin(f"Qwen/Qwen2.5-{size}-Instruct", "qwen2", layers, hidden, ffn, heads, kv_heads,
                   **{"vocab": 152064} | other)


def _qwen3(size: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **other: Any) -> Builtin:
    return Builtin(f"Qwen/Qwen3-{size}", "qwen3", layers, hidden, ffn, heads, kv_heads,
                   **{"vocab": 151936, "max_positions": 40960} | other)


SMALL_QWEN2 = {"vocab": 151936, "tied": True}

BUILTIN: dict[str, Builtin] = {
    "llama-3-8b": _llama("Meta-Llama-3-8B", 32, 4096, 14336, 32, rope=LLAMA3_ROPE, max_positions=8192),
    "llama-3-70b": _llama("Meta-Llama-3-70B", 80, 8192, 28672, 64, rope=LLAMA3_ROPE, max_positions=8192),
    "llama-3.1-8b": _llama("Llama-3.1-8B", 32, 4096, 14336, 32),
    "llama-3.1-70b": _llama("Llama-3.1-70B", 80, 8192, 28672, 64),
    "llama-3.1-405b": _llama("Llama-3.1-405B", 126, 16384, 53248, 128),
    "llama-3.2-1b": _llama("Llama-3.2-1B", 16, 2048, 8192, 32, head_dim=64, tied=True,
                           rope=LLAMA31_ROPE | {"factor": 32.0}),
    "llama-3.2-3b": _llama("Llama-3.2-3B", 28, 3072, 8192, 24, tied=True, rope=LLAMA31_ROPE | {"factor": 32.0}),
    "llama-3.3-70b": _llama("Llama-3.3-70B-Instruct", 80, 8192, 28672, 64),
    "qwen2.5-0.5b": _qwen2("0.5B", 24, 896, 4864, 14, 2, head_dim=64, **SMALL_QWEN2),
    "qwen2.5-1.5b": _qwen2("1.5B", 28, 1536, 8960, 12, 2, **SMALL_QWEN2),
    "qwen2.5-3b": _qwen2("3B", 36, 2048, 11008, 16, 2, **SMALL_QWEN2),
    "qwen2.5-7b": _qwen2("7B", 28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _qwen2("14B", 48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _qwen2("32B", 64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _qwen2("72B", 80, 8192, 29568, 64, 8),
    "qwen3-0.6b": _qwen3("0.6B", 28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3("1.7B", 28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": _qwen3("4B", 36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _qwen3("8B", 36, 4096, 12288, 32, 8),
    "qwen3-14b": _qwen3("14B", 40, 5120, 17408, 40, 8),
    "qwen3-32b": _qwen3("32B", 64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _qwen3("30B-A3B", 48, 2048, 6144, 32, 4, experts=128, experts_per_token=8, moe_ffn=768),
    "qwen3-235b-a22b": _qwen3("235B-A22B", 94, 4096, 12288, 64, 4, experts=128, experts_per_token=8, moe_ffn=1536),
}


def known(name: str) -> str | None:
    """The key of the table that a name means, or None. Case, a Hugging Face organisation in front and `-Instruct` or
    `-Base` behind do not matter; `llama3-8b` is `llama-3-8b`, `llama31-405b` is `llama-3.1-405b`."""
    plain = name.strip().lower().rsplit("/", 1)[-1].removeprefix("meta-")
    for ending in ("-instruct", "-base"):
        plain = plain.removesuffix(ending)
    plain = re.sub(r"^llama-?3\.?([1-3])-", r"llama-3.\1-", plain).replace("llama3-", "llama-3-")
    return plain if plain in BUILTIN else None


def builtin(name: str, where: str | None = None) -> ModelShape:
    """The shape of a model of the table.

    Raises:
        UserError: a name that is not in the table; names the nearest ones and all.
    """
    key, row = _row(name, where)
    return ModelShape(
        name=key, layers=row.layers, hidden=row.hidden,
        ffn=row.ffn, heads=row.heads, kv_heads=row.kv_heads,
        head_dim=row.head_dim, vocab=row.vocab, tied=row.tied, qkv_bias=row.family == "qwen2",
        qk_norm=row.family == "qwen3", experts=row.experts, experts_per_token=row.experts_per_token,
        moe_ffn=row.moe_ffn)


def from_builtin(name: str, where: str | None = None) -> Architecture:
    """The whole architecture of a model of the table: a run can be planned before its weights are there.

    Raises:
        UserError: not in the table.
    """
    _, row = _row(name, where)
    return Architecture(
        family="qwen3_moe" if row.experts else row.family, layers=row.layers, hidden=row.hidden, ffn=row.ffn,
        heads=row.heads, kv_heads=row.kv_heads, head_dim=row.head_dim, vocab=row.vocab, tied_embeddings=row.tied,
        qkv_bias=row.family == "qwen2",
        qk_norm=row.family == "qwen3", norm_eps=row.norm_eps, max_positions=row.max_positions,
        initializer_range=0.02, rope=dict(sorted(row.rope.items())), experts=row.experts,
        experts_per_token=row.experts_per_token, moe_ffn=row.moe_ffn)


def from_architecture(architecture: Architecture, name: str = "model") -> ModelShape:
    """The shape of what the trainer runs."""
    a = architecture
    return ModelShape(name=name, layers=a.layers, hidden=a.hidden, ffn=a.ffn, heads=a.heads, kv_heads=a.kv_heads,
                      head_dim=a.head_dim, vocab=a.vocab, tied=a.tied_embeddings, qkv_bias=a.qkv_bias,
                      qk_norm=a.qk_norm, experts=a.experts, experts_per_token=a.experts_per_token,
                      moe_ffn=a.moe_ffn)


MOE_FAMILIES = {"Qwen3MoeForCausalLM": "Qwen3ForCausalLM"}
"""Mixtures of experts that can be planned but not run: architecture name -> the dense one with the same attention."""


def architecture_for_planning(folder: str | Path) -> Architecture:
    """The architecture of a Hugging Face model folder: what `from_hf_config` reads, and Qwen3's experts.

    Raises:
        UserError: as `from_hf_config`; experts that are not in every layer.
    """
    folder = Path(folder)
    config, where = read_hf_config(folder), str(folder / "config.json")
    names = config.get("architectures")
    dense = MOE_FAMILIES.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    if dense is None:
        return from_hf_dict(config, where)
    sizes = [_size(config, key, where) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")]
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UserError("mlp_only_layers or decoder_sparse_step: experts in some layers only are not modelled",
                        where=where, fix="use a model with experts in every layer")
    if sizes[1] > sizes[0]:
        raise UserError(f"num_experts_per_tok = {sizes[1]} exceeds num_experts = {sizes[0]}", where=where,
                        fix="restore the model's own config.json")
    plain = config | {"architectures": [dense], "model_type": "qwen3", "num_experts": None}
    return from_hf_dict(plain, where).model_copy(update={
        "family": "qwen3_moe", "experts": sizes[0], "experts_per_token": sizes[1], "moe_ffn": sizes[2]})


def _row(name: str, where: str | None) -> tuple[str, Builtin]:
    key = known(str(name))
    if key is None:
        close = nearest_few(str(name).lower().rsplit("/", 1)[-1], BUILTIN, alike=0.4)
        raise UserError(f"no built-in model {name!r}", where=where,
                        fix=(f"nearest: {', '.join(close)}; " if close else "") + f"known: {', '.join(BUILTIN)}")
    return key, BUILTIN[key]


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key} = {value!r} is not a positive integer", where=where,
                        fix="restore the model's own config.json")
    return value
