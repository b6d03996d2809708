"""The data passed between rollout, reward, advantage and update. NumPy only, so that Ray moves it without a copy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, rendered and tokenised once for engines and trainer."""

    index: int
    """Place in the data set that the run uses."""
    token_ids: np.ndarray
    """int32 [P]."""
    text: str
    """The rendered prompt."""
    answer: str | None
    columns: dict
    """The row's other columns, passed to the reward."""
    instance: int = 0
    """Number of earlier prompts in the same batch with the same index."""
    dropped_before: int = 0
    """Number of earlier rows that the run does not use (`data.overlong: drop`)."""

    @property
    def row(self) -> int:
        """Row in the file, for people."""
        return self.index + self.dropped_before


@dataclass(frozen=True)
class Trajectory:
    """All tokens after a prompt. The policy sampled some of them (the engine's own ids, never re-tokenised). Tools or
    an environment wrote the others between its turns. Those carry no loss, and their entries in `logprobs` and
    `weight_versions` are never read.

    Raises:
        ValueError: the arrays have different lengths.
    """

    token_ids: np.ndarray
    """int32 [R], stop tokens included."""
    sampled: np.ndarray
    """bool [R]: whether the policy sampled the token."""
    logprobs: np.ndarray
    """float32 [R]: behaviour log-probs of the sampled tokens (from the processed distribution, after temperature)."""
    weight_versions: np.ndarray
    """int32 [R]: the weight version that produced each sampled token."""
    finish_reason: str
    """How the last turn ended: `stop`, `length` or `abort`."""
    text: str = ""
    """Decoded text, only for rewards and people."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("token_ids", "sampled", "logprobs", "weight_versions")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"a trajectory of {lengths['token_ids']} tokens with "
                             + ", ".join(f"{length} {name}" for name, length in list(lengths.items())[1:]))

    @staticmethod
    def one_turn(token_ids: np.ndarray, logprobs: np.ndarray, weight_versions: np.ndarray, finish_reason: str,
                 text: str = "") -> Trajectory:
        """A trajectory of one answer: every token is sampled."""
        sampled = np.ones(len(token_ids), dtype=bool)
        return Trajectory(token_ids, sampled, logprobs, weight_versions, finish_reason, text)

    @property
    def length(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(self.sampled.sum())


@dataclass(frozen=True)
class Group:
    """The G trajectories of one prompt instance."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    engine: int = 0


@dataclass(frozen=True)
class PolicyBatch:
    """B sequences of N tokens in total, concatenated: prompts with their trajectories. The value at a token's position
    belongs to the *prediction of that token*: `logprobs_N[j]` is log p(token j | tokens before it). Only sampled tokens
    are predicted. The others are context."""

    tokens_N: np.ndarray
    """int32."""
    lengths_B: np.ndarray
    """int32, prompt + trajectory; sums to N."""
    prompt_lengths_B: np.ndarray
    """int32."""
    sampled_N: np.ndarray
    """bool: the policy sampled this token. False for prompts and for tokens that tools or an environment wrote."""
    loss_weights_N: np.ndarray
    """float32, 0 for tokens outside the loss. The loss is the plain sum over tokens of weight x token loss, divided
    once by the normaliser, so it does not depend on DP, CP, micro-batches or packing (`algorithms.aggregation`)."""
    advantages_N: np.ndarray
    """float32, 0 for tokens that were not sampled."""
    behaviour_logprobs_N: np.ndarray
    """float32, 0 for tokens that were not sampled."""
    ages_N: np.ndarray
    """int32: number of versions by which the trainer's weights at the start of the step are ahead of those that sampled
    the token. 0: the same weights. 0 for tokens that were not sampled."""
    normaliser: float = 1.0
    """Divides the loss and its gradient. The normalisers of the parts of a batch add up."""
    number: int = 0
    """Tells the batches of a run apart: a training rank finds by it the log-probs that it keeps for the batch
    (`megatron_rl.trainer.fixed_logprobs`)."""
    extras: dict = field(default_factory=dict)

    @property
    def offsets_B1(self) -> np.ndarray:
        """int64 [B + 1]: sequence b is `tokens_N[offsets[b]:offsets[b + 1]]`."""
        return np.concatenate([[0], np.cumsum(self.lengths_B, dtype=np.int64)])
