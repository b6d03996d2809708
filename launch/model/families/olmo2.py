"""OLMo-2: norms at the output of attention and MLP, and query and key norms over the whole projection."""

from __future__ import annotations

from typing import Any

from launch.model.architecture import Architecture
from launch.model.family import Family, Fields

FEATURES: dict[str, Any] = {"post_norm": True, "qk_norm": True, "qk_norm_whole": True}


def read(config: Fields) -> dict[str, Any]:
    return {"kv_heads": config.integer("num_key_value_heads", default=config.integer("num_attention_heads")),
            **FEATURES}


def _model(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> Architecture:
    return Architecture(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=128,
                        vocab=100352, tied=False, family="olmo2", norm_eps=1e-6, max_positions=4096,
                        rope={"rope_theta": 500_000.0, "rope_type": "default"}, **FEATURES)


FAMILY = Family("Olmo2ForCausalLM", "olmo2", read, published={
    "olmo-2-1124-7b": _model(32, 4096, 11008, 32, 32),
    "olmo-2-1124-13b": _model(40, 5120, 13824, 40, 40),
    "olmo-2-0325-32b": _model(64, 5120, 27648, 40, 8),
})
