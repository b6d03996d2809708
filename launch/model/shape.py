"""What the planner's formulas need of a model: `ModelShape`, from a Hugging Face config, the built-in table or a
measured point. Wider than `Architecture`, which is what the trainer can run: experts and two-matrix MLPs are here so
that the arithmetic can be checked against published runs of such models."""

from __future__ import annotations

from dataclasses import dataclass

VOCAB_MULTIPLE = 128
"""Megatron's `make_vocab_size_divisible_by`: the padded vocabulary is a multiple of this times TP."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer. Heads x head_dim may differ from hidden (Qwen3-32B: 8192 against 5120)."""

    name: str
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
    """The head is the embedding: counted once, held twice under PP > 1."""
    mlp_matrices: int = 3
    """3 for SwiGLU, 2 for GELU and squared ReLU."""
    qkv_bias: bool = False
    qk_norm: bool = False
    all_biases: bool = False
    """Every linear layer and norm has a bias (GPT-2 style)."""
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 with rotary positions."""
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    """Width of one expert."""
    shared_ffn: int = 0
    """Width of the shared experts together; 0 without."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of K alone (V is as wide)."""
        return self.kv_heads * self.head_dim
