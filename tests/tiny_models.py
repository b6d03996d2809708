"""Tiny Hugging Face model folders for every area's tests."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.models.tiny import FAMILIES, write_tiny

__all__ = ["FAMILIES", "make_tiny"]


def make_tiny(folder: str | Path, family: str = "llama", seed: int = 0, **overrides) -> Path:
    """A model folder with safetensors and a byte tokenizer; every norm, bias and weight differs from its neighbours.

    `overrides` are keys of the family's config (num_hidden_layers, tie_word_embeddings, rope_scaling, ...) or of
    `write_tiny` (tokenizer, dtype). Untied and 320 tokens by default.
    """
    return write_tiny(folder, family, seed, **{"lively": True, **overrides})
