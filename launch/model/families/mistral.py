"""Mistral without a sliding window: 7B from v0.2 on, and Nemo, whose heads x head_dim differs from its hidden size."""

from __future__ import annotations

from typing import Any

from launch.model.architecture import Architecture
from launch.model.family import Family, Fields

ROPE = {"rope_theta": 1_000_000.0, "rope_type": "default"}


def read(config: Fields) -> dict[str, Any]:
    if "sliding_window" not in config.config:      # Hugging Face and vLLM then assume 4096
        config.refuse("sliding_window", "the file does not turn the window off, and the default is a window of "
                      "4096", 'write "sliding_window": null if the model has full attention')
    return {}


def _model(layers: int, hidden: int, ffn: int, vocab: int, max_positions: int) -> Architecture:
    return Architecture(layers=layers, hidden=hidden, ffn=ffn, heads=32, kv_heads=8, head_dim=128, vocab=vocab,
                        tied=False, family="mistral", norm_eps=1e-5, max_positions=max_positions, rope=ROPE)


FAMILY = Family("MistralForCausalLM", "mistral", read, published={
    "mistral-7b-v0.3": _model(32, 4096, 14336, 32768, 32768),
    "mistral-nemo-2407": _model(40, 5120, 14336, 131072, 1_024_000),
})
