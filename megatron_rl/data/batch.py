"""What travels between rollout, reward, advantage and update. NumPy only: Ray moves these without a copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, rendered and tokenised once, for both sides."""

    index: int
    """Row in the data set."""
    token_ids: np.ndarray
    """int32 [P]."""
    text: str
    """The rendered prompt."""
    answer: str | None
    columns: dict
    """The row's other columns, passed to the reward."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer: the engine's own ids (never re-tokenised) and what it said of them."""

    token_ids: np.ndarray
    """int32 [R], the stop token included."""
    logprobs: np.ndarray
    """float32 [R]: behaviour log-probs (of the processed distribution: temperature applied)."""
    text: str
    """Decoded text, for rewards and people only."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weight_versions: np.ndarray
    """int32 [R]: the weight version that produced each token."""


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt instance."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    engine: int = 0


@dataclass(frozen=True)
class PolicyBatch:
    """B sequences, N tokens in all, concatenated. A value at a token's place belongs to the *prediction of that
    token*: `logprobs_N[j]` is log p(token j | tokens before it). Prompt tokens have weight 0."""

    tokens_N: np.ndarray
    """int32."""
    lengths_B: np.ndarray
    """int32, prompt + completion; sums to N."""
    prompt_lengths_B: np.ndarray
    """int32."""
    loss_weights_N: np.ndarray
    """float32: mask times the normaliser of the chosen aggregation, computed on the global batch; the loss is the
    plain sum over tokens of weight x token loss, so it cannot depend on DP, CP, micro-batches or packing."""
    advantages_N: np.ndarray
    """float32."""
    behaviour_logprobs_N: np.ndarray
    """float32, 0 on the prompt."""
    old_logprobs_N: np.ndarray | None = None
    """float32 proximal log-probs, or None: see `algorithm.old_logprobs`."""
    reference_logprobs_N: np.ndarray | None = None
    """float32, or None when `algorithm.kl.beta` is 0."""
    extras: dict = field(default_factory=dict)

    @property
    def offsets_B1(self) -> np.ndarray:
        """int64 [B + 1]: sequence b is `tokens_N[offsets[b]:offsets[b + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.lengths_B, dtype=np.int64)])
