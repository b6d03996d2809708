"""Llama 1 to 3.3. In old files without KV heads, every head has its own."""

from __future__ import annotations

from typing import Any

from launch.model.architecture import Architecture
from launch.model.family import Family, Fields

LLAMA3_ROPE = {"rope_theta": 500_000.0, "rope_type": "default"}
LLAMA31_ROPE = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_theta": 500_000.0, "rope_type": "llama3"}
LLAMA32_ROPE = LLAMA31_ROPE | {"factor": 32.0}


def read(config: Fields) -> dict[str, Any]:
    return {"kv_heads": config.integer("num_key_value_heads", default=config.integer("num_attention_heads"))}


def _model(layers: int, hidden: int, ffn: int, heads: int, **other: Any) -> Architecture:
    sizes: dict[str, Any] = {"head_dim": 128, "tied": False, "max_positions": 131072, "rope": LLAMA31_ROPE} | other
    return Architecture(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=8, vocab=128256, family="llama",
                        norm_eps=1e-5, **sizes)


FAMILY = Family("LlamaForCausalLM", "llama", read, published={
    "llama-3-8b": _model(32, 4096, 14336, 32, rope=LLAMA3_ROPE, max_positions=8192),
    "llama-3-70b": _model(80, 8192, 28672, 64, rope=LLAMA3_ROPE, max_positions=8192),
    "llama-3.1-8b": _model(32, 4096, 14336, 32),
    "llama-3.1-70b": _model(80, 8192, 28672, 64),
    "llama-3.1-405b": _model(126, 16384, 53248, 128),
    "llama-3.2-1b": _model(16, 2048, 8192, 32, head_dim=64, tied=True, rope=LLAMA32_ROPE),
    "llama-3.2-3b": _model(28, 3072, 8192, 24, tied=True, rope=LLAMA32_ROPE),
    "llama-3.3-70b": _model(80, 8192, 28672, 64),
})
