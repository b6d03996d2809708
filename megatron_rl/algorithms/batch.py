"""From scored groups to the mini-batches of the optimizer: advantages, loss mask, normaliser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.config.schema import Algorithm
from megatron_rl.algorithms.advantages import GroupStatistics, group_advantages, group_statistics
from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.data.batch import Completion, Group, PolicyBatch


class NothingToLearn(RuntimeError):
    """No group of a rollout batch has two finished completions: there is nothing to compare."""


@dataclass(frozen=True)
class BatchStatistics:
    """What a rollout batch looked like, before any update: of the finished completions of the groups that were kept.
    Lengths are completion tokens."""

    groups: GroupStatistics
    dropped: float
    """Share of all groups that were left out, because fewer than two of their completions finished."""
    samples: int
    """Completions that were counted."""
    reward_mean: float
    reward_std: float
    """Over all samples."""
    reward_max: float
    length_mean: float
    length_max: int
    truncated: float
    """Share of completions that ended at the length limit."""
    masked: float
    """Share of completions kept out of the loss."""

    def metrics(self) -> dict[str, float]:
        """By the names they have in the metric files."""
        return {
            "reward/mean": self.reward_mean, "reward/std": self.reward_std, "reward/max": self.reward_max,
            "group/zero_variance": self.groups.zero_variance, "group/all_right": self.groups.all_right,
            "group/all_wrong": self.groups.all_wrong, "group/reward_std": self.groups.mean_std,
            "group/dropped": self.dropped,
            "response/length_mean": self.length_mean, "response/length_max": float(self.length_max),
            "response/truncated": self.truncated, "response/masked": self.masked,
        }


def build_policy_batch(groups: Sequence[Group], rewards: Sequence[np.ndarray], config: Algorithm,
                       max_new_tokens: int) -> tuple[list[PolicyBatch], BatchStatistics]:
    """The `updates_per_batch` mini-batches of one rollout batch, each a share of whole groups in the given order.

    Advantages come from all finished completions of a group. `truncated: mask` takes completions that hit the length
    limit out of the loss, but their reward stays in the baseline: dropping it there would make the other answers look
    worse than they are. A completion that an engine gave up (`abort`) is no answer: it is in neither. A group with
    fewer than two finished completions has no baseline and is left out. Loss weights are normalised over each
    mini-batch, since each is one optimizer step.

    Args:
        groups: groups of any sizes.
        rewards: `rewards[g][i]` is the reward of `groups[g].completions[i]`; those of aborted completions are not
            looked at.
        max_new_tokens: the length limit (`aggregation: constant` divides by it).
    Returns:
        The mini-batches, sizes differing by one group at most, and fewer than `updates_per_batch` if fewer groups
        were kept; `extras` holds `group_B` (the group's place in `groups`), `reward_B`, `kept_B` and `update_index`
        (0 is the first). And the statistics of the whole batch.
    Raises:
        ValueError: fewer groups than updates, or rewards that do not fit the groups.
        NothingToLearn: no group was kept.
    """
    _check(groups, rewards, config)
    usable = [answers for answers in map(_finished, range(len(groups)), groups, rewards) if answers is not None]
    if not usable:
        raise NothingToLearn(f"the engines gave up so many completions that none of the {len(groups)} groups has two "
                             "left; their logs say why")
    advantages = group_advantages([answers.rewards_G for answers in usable], config.advantage)
    shares = np.array_split(np.arange(len(usable)), min(config.updates_per_batch, len(usable)))
    batches = [_mini_batch([(usable[u], advantages[u]) for u in share], config, max_new_tokens) for share in shares]
    for index, batch in enumerate(batches):
        batch.extras["update_index"] = index
    return batches, _statistics(usable, len(groups), config)


@dataclass(frozen=True)
class _Answers:
    """The finished completions of one group."""

    place: int
    """The group's place in the rollout batch."""
    prompt_P: np.ndarray
    completions: tuple[Completion, ...]
    rewards_G: np.ndarray
    """float64."""


def _finished(place: int, group: Group, rewards_G: np.ndarray) -> _Answers | None:
    """None if too few finished to be compared with each other."""
    finished = [i for i, completion in enumerate(group.completions) if completion.finish_reason != "abort"]
    if len(finished) < min(2, len(group.completions)):
        return None
    return _Answers(place, group.prompt.token_ids, tuple(group.completions[i] for i in finished),
                    np.asarray(rewards_G, dtype=np.float64)[finished])


def _mini_batch(share: Sequence[tuple[_Answers, np.ndarray]], config: Algorithm, max_new_tokens: int) -> PolicyBatch:
    prompts = [answers.prompt_P for answers, _ in share for _ in answers.completions]
    completions = [completion for answers, _ in share for completion in answers.completions]
    prompt_lengths_B = np.array([len(prompt_P) for prompt_P in prompts], dtype=np.int32)
    response_lengths_B = np.array([len(completion.token_ids) for completion in completions], dtype=np.int32)
    kept_B = np.array([_kept(completion, config) for completion in completions])
    weights_B = loss_weights(response_lengths_B, kept_B, config.aggregation, max_new_tokens)
    advantages_B = np.concatenate([advantages_G for _, advantages_G in share]).astype(np.float32)
    places_B = [answers.place for answers, _ in share for _ in answers.completions]
    rewards_B = np.concatenate([answers.rewards_G for answers, _ in share])

    def on_responses(values_B: np.ndarray) -> np.ndarray:
        """The value of sequence b on its completion's tokens, the stop token included; 0 on its prompt."""
        pairs_2B = np.stack([np.zeros_like(values_B), values_B], axis=1).ravel()
        return np.repeat(pairs_2B, np.stack([prompt_lengths_B, response_lengths_B], axis=1).ravel())

    return PolicyBatch(
        tokens_N=_interleave(prompts, [completion.token_ids for completion in completions], np.int32),
        lengths_B=prompt_lengths_B + response_lengths_B,
        prompt_lengths_B=prompt_lengths_B,
        loss_weights_N=on_responses(weights_B),
        advantages_N=on_responses(advantages_B),
        behaviour_logprobs_N=_interleave([np.zeros(len(prompt_P)) for prompt_P in prompts],
                                         [completion.logprobs for completion in completions], np.float32),
        extras={"group_B": np.array(places_B, dtype=np.int32), "reward_B": rewards_B.astype(np.float32),
                "kept_B": kept_B},
    )


def _interleave(prompts: list[np.ndarray], responses: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([part for pair in zip(prompts, responses, strict=True) for part in pair]).astype(dtype)


def _kept(completion: Completion, config: Algorithm) -> bool:
    return not (config.truncated == "mask" and completion.finish_reason == "length")


def _check(groups: Sequence[Group], rewards: Sequence[np.ndarray], config: Algorithm) -> None:
    if len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} groups but rewards of {len(rewards)}")
    if len(groups) < config.updates_per_batch:
        raise ValueError(f"{len(groups)} groups cannot be shared among {config.updates_per_batch} updates")
    for group, rewards_G in zip(groups, rewards, strict=True):
        where = f"prompt {group.prompt.index}"
        if len(group.completions) != len(rewards_G):
            raise ValueError(f"{where}: {len(group.completions)} completions but {len(rewards_G)} rewards")
        for completion in group.completions:
            if len(completion.token_ids) != len(completion.logprobs):
                raise ValueError(f"{where}: {len(completion.token_ids)} tokens but {len(completion.logprobs)} "
                                 f"log-probs")


def _statistics(usable: Sequence[_Answers], groups: int, config: Algorithm) -> BatchStatistics:
    rewards_B = np.concatenate([answers.rewards_G for answers in usable])
    completions = [completion for answers in usable for completion in answers.completions]
    lengths_B = np.array([len(completion.token_ids) for completion in completions])
    return BatchStatistics(
        groups=group_statistics([answers.rewards_G for answers in usable]),
        dropped=1.0 - len(usable) / groups,
        samples=len(completions),
        reward_mean=float(rewards_B.mean()),
        reward_std=float(rewards_B.std()),
        reward_max=float(rewards_B.max()),
        length_mean=float(lengths_B.mean()),
        length_max=int(lengths_B.max()),
        truncated=float(np.mean([completion.finish_reason == "length" for completion in completions])),
        masked=float(np.mean([not _kept(completion, config) for completion in completions])),
    )
