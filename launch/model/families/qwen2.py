"""Qwen2 and Qwen2.5: q, k and v have biases, which config.json does not mention."""

from __future__ import annotations

from typing import Any

from launch.model.architecture import Architecture
from launch.model.family import Family, Fields

ROPE = {"rope_theta": 1_000_000.0, "rope_type": "default"}


def read(config: Fields) -> dict[str, Any]:
    return {"qkv_bias": True}


def _model(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 152064, tied: bool = False,
           head_dim: int = 128) -> Architecture:
    return Architecture(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                        vocab=vocab, tied=tied, qkv_bias=True, family="qwen2", norm_eps=1e-6, max_positions=32768,
                        rope=ROPE)


FAMILY = Family("Qwen2ForCausalLM", "qwen2", read, window_has_switch=True, published={
    "qwen2.5-0.5b": _model(24, 896, 4864, 14, 2, 151936, tied=True, head_dim=64),
    "qwen2.5-1.5b": _model(28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _model(36, 2048, 11008, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _model(28, 3584, 18944, 28, 4),
    "qwen2.5-14b": _model(48, 5120, 13824, 40, 8),
    "qwen2.5-32b": _model(64, 5120, 27648, 40, 8),
    "qwen2.5-72b": _model(80, 8192, 29568, 64, 8),
})
