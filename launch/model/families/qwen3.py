"""Dense Qwen3: RMSNorm of each head's query and key; head_dim is 128 by default."""

from __future__ import annotations

from typing import Any

from launch.model.architecture import Architecture
from launch.model.family import Family, Fields

ROPE = {"rope_theta": 1_000_000.0, "rope_type": "default"}


def read(config: Fields) -> dict[str, Any]:
    return {"qk_norm": True, "head_dim": config.integer("head_dim", default=128)}


def model(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int = 8, tied: bool = False,
          **experts: Any) -> Architecture:
    return Architecture(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=128,
                        vocab=151936, tied=tied, qk_norm=True, norm_eps=1e-6, max_positions=40960, rope=ROPE,
                        **{"family": "qwen3", **experts})


FAMILY = Family("Qwen3ForCausalLM", "qwen3", read, window_has_switch=True, published={
    "qwen3-0.6b": model(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": model(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": model(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": model(36, 4096, 12288, 32),
    "qwen3-14b": model(40, 5120, 17408, 40),
    "qwen3-32b": model(64, 5120, 25600, 64),
})
