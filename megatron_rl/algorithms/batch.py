"""Turns scored groups into the mini-batches of the optimizer: advantages, loss mask, normaliser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launch.config.schema import Algorithm
from launch.errors import UserError
from megatron_rl.algorithms.advantages import group_advantages, group_metrics, whitened_advantages
from megatron_rl.algorithms.aggregation import loss_weights
from megatron_rl.data.batch import Group, PolicyBatch, Trajectory


class NothingToLearn(RuntimeError):
    """The engines aborted so much that no group of a rollout batch has two trajectories to compare."""


@dataclass(frozen=True)
class BatchStatistics:
    """Statistics of a rollout batch before any update. They cover the trajectories that count, of the groups that were
    kept. Lengths are in sampled tokens."""

    groups: dict[str, float]
    """See `group_metrics`."""
    dropped: float
    """Share of all groups that were dropped because fewer than two of their trajectories count."""
    reward_mean: float
    reward_std: float
    """Over all samples."""
    reward_max: float
    length_mean: float
    length_max: int
    truncated: float
    """Share of trajectories that ended at the length limit."""
    masked: float
    """Share of trajectories excluded from the loss."""

    def metrics(self) -> dict[str, float]:
        """The statistics by metric name, as in the metric files."""
        return {
            "reward/mean": self.reward_mean, "reward/std": self.reward_std, "reward/max": self.reward_max,
            **self.groups, "group/dropped": self.dropped,
            "response/length_mean": self.length_mean, "response/length_max": float(self.length_max),
            "response/truncated": self.truncated, "response/masked": self.masked,
        }


def build_policy_batches(groups: Sequence[Group], rewards: Sequence[np.ndarray], config: Algorithm,
                         max_new_tokens: int, version: int) -> list[PolicyBatch]:
    """Split one rollout batch into `updates_per_batch` mini-batches of whole groups, in the given order. With
    `algorithm.overlap`, `groups` may be a part of the rollout batch, which then is a part of its only mini-batch.

    Advantages come from all trajectories of a group that count. `truncated: mask` excludes trajectories that hit the
    length limit from the loss, but their reward stays in the baseline: without it the other answers would look worse
    than they are. A trajectory that an engine aborted (`abort`), or whose reward failed (NaN), does not count: it is in
    neither. A group in which fewer than two count has no baseline and is dropped. Each mini-batch has its own
    normaliser, because it is one optimizer step. Whitened advantages see the tokens of all mini-batches.

    Args:
        groups: groups of any size.
        rewards: `rewards[g][i]` is the reward of `groups[g].trajectories[i]`: NaN if it failed, ignored if that one was
            aborted.
        max_new_tokens: the length limit (`aggregation: constant` divides by it).
        version: the version of the trainer's weights, from which the ages of tokens count.
    Returns:
        The mini-batches. Sizes differ by at most one group. There are fewer than `updates_per_batch` mini-batches if
        fewer groups were kept. `extras` holds `group_B` (the group's place in `groups`), `reward_B` and `kept_B`.
    Raises:
        ValueError: there are fewer groups than updates, the rewards do not match the groups, or a token was sampled by
            a version after `version`.
    """
    _check(groups, rewards, config)
    usable = _usable(groups, rewards)
    if not usable:
        return []
    advantages = _advantages(usable, config)
    shares = np.array_split(np.arange(len(usable)), min(config.updates_per_batch, len(usable)))
    return [_mini_batch([(usable[u], advantages[u]) for u in share], config, max_new_tokens, version)
            for share in shares]


def batch_statistics(groups: Sequence[Group], rewards: Sequence[np.ndarray], config: Algorithm) -> BatchStatistics:
    """The statistics of a whole rollout batch. For `groups` and `rewards` see `build_policy_batches`.

    Raises:
        NothingToLearn: no group was kept, because of the engines.
        UserError: no group was kept, because of the rewards.
    """
    usable = _usable(groups, rewards)
    if not usable:
        raise _nothing_to_learn(groups, rewards)
    rewards_B = np.concatenate([answers.rewards_G for answers in usable])
    trajectories = [trajectory for answers in usable for trajectory in answers.trajectories]
    lengths_B = np.array([trajectory.length for trajectory in trajectories])
    return BatchStatistics(
        groups=group_metrics([answers.rewards_G for answers in usable]),
        dropped=1.0 - len(usable) / len(groups),
        reward_mean=float(rewards_B.mean()),
        reward_std=float(rewards_B.std()),
        reward_max=float(rewards_B.max()),
        length_mean=float(lengths_B.mean()),
        length_max=int(lengths_B.max()),
        truncated=float(np.mean([trajectory.finish_reason == "length" for trajectory in trajectories])),
        masked=float(np.mean([not _kept(trajectory, config) for trajectory in trajectories])),
    )


@dataclass(frozen=True)
class _Answers:
    """The trajectories of one group that count."""

    place: int
    """The group's place in the rollout batch."""
    prompt_P: np.ndarray
    trajectories: tuple[Trajectory, ...]
    rewards_G: np.ndarray
    """float64."""


def _usable(groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> list[_Answers]:
    return [answers for answers in map(_counted, range(len(groups)), groups, rewards) if answers is not None]


def _counted(place: int, group: Group, rewards_G: np.ndarray) -> _Answers | None:
    """The trajectories of a group that count, or None if they are too few to compare."""
    counted = [i for i, (trajectory, reward) in enumerate(zip(group.trajectories, rewards_G, strict=True))
               if trajectory.finish_reason != "abort" and not np.isnan(reward)]
    if len(counted) < min(2, len(group.trajectories)):
        return None
    return _Answers(place, group.prompt.token_ids, tuple(group.trajectories[i] for i in counted),
                    np.asarray(rewards_G, dtype=np.float64)[counted])


def _nothing_to_learn(groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> Exception:
    """The error of a batch without a usable group. It blames whoever took more of the trajectories away."""
    aborted_B = np.array([each.finish_reason == "abort" for group in groups for each in group.trajectories])
    failed_B = ~aborted_B & np.isnan(np.concatenate(rewards))
    if aborted_B.sum() >= failed_B.sum():
        return NothingToLearn(f"the engines aborted so many trajectories that none of the {len(groups)} groups has two "
                              "left to compare (see their logs)")
    return UserError(f"the reward of {failed_B.sum()} of {len(failed_B)} trajectories failed, so that none of the "
                     f"{len(groups)} groups of the batch has two with a reward to compare", where="reward.functions",
                     fix="see the first of them in attempts/<n>/failed_samples, and correct the reward or the data, or "
                         "raise reward.timeout_s")


def _advantages(usable: Sequence[_Answers], config: Algorithm) -> list[np.ndarray]:
    rewards, kind = [answers.rewards_G for answers in usable], config.advantage
    if kind == "reinforce_pp" or kind == "reinforce_pp_baseline":
        tokens = [np.array([each.length * _kept(each, config) for each in answers.trajectories]) for answers in usable]
        return whitened_advantages(rewards, tokens, baseline=kind == "reinforce_pp_baseline")
    return group_advantages(rewards, kind)


def _mini_batch(share: Sequence[tuple[_Answers, np.ndarray]], config: Algorithm, max_new_tokens: int,
                version: int) -> PolicyBatch:
    prompts = [answers.prompt_P for answers, _ in share for _ in answers.trajectories]
    trajectories = [trajectory for answers, _ in share for trajectory in answers.trajectories]
    prompt_lengths_B = np.array([len(prompt_P) for prompt_P in prompts], dtype=np.int32)
    lengths_B = prompt_lengths_B + np.array([len(each.token_ids) for each in trajectories], dtype=np.int32)
    kept_B = np.array([_kept(trajectory, config) for trajectory in trajectories])
    weights_B, normaliser = loss_weights(np.array([each.length for each in trajectories]), kept_B, config.aggregation,
                                         max_new_tokens)
    advantages_B = np.concatenate([advantages_G for _, advantages_G in share]).astype(np.float32)
    places_B = [answers.place for answers, _ in share for _ in answers.trajectories]
    rewards_B = np.concatenate([answers.rewards_G for answers, _ in share])
    no_prompts = [np.zeros(len(prompt_P)) for prompt_P in prompts]
    sampled_N = _interleave(no_prompts, [each.sampled for each in trajectories], bool)

    def on_sampled(values_N: np.ndarray) -> np.ndarray:
        return np.where(sampled_N, values_N, np.float32(0))

    return PolicyBatch(
        tokens_N=_interleave(prompts, [each.token_ids for each in trajectories], np.int32),
        lengths_B=lengths_B, prompt_lengths_B=prompt_lengths_B, sampled_N=sampled_N,
        loss_weights_N=on_sampled(np.repeat(weights_B, lengths_B)),
        advantages_N=on_sampled(np.repeat(advantages_B, lengths_B)),
        behaviour_logprobs_N=on_sampled(_interleave(no_prompts, [each.logprobs for each in trajectories], np.float32)),
        ages_N=_ages(_interleave(no_prompts, [each.weight_versions for each in trajectories], np.int32), sampled_N,
                     version),
        normaliser=normaliser,
        extras={"group_B": np.array(places_B, dtype=np.int32), "reward_B": rewards_B.astype(np.float32),
                "kept_B": kept_B},
    )


def _ages(versions_N: np.ndarray, sampled_N: np.ndarray, version: int) -> np.ndarray:
    ages_N = np.where(sampled_N, version - versions_N, 0).astype(np.int32)
    if ages_N.min(initial=0) < 0:
        raise ValueError(f"a token was sampled by version {versions_N[sampled_N].max()}, and the trainer has version "
                         f"{version}")
    return ages_N


def _interleave(prompts: list[np.ndarray], trajectories: list[np.ndarray], dtype: type) -> np.ndarray:
    parts = [part for pair in zip(prompts, trajectories, strict=True) for part in pair]
    return np.concatenate(parts, dtype=dtype, casting="unsafe")     # at once: a batch has millions of tokens


def _kept(trajectory: Trajectory, config: Algorithm) -> bool:
    return not (config.truncated == "mask" and trajectory.finish_reason == "length")


def _check(groups: Sequence[Group], rewards: Sequence[np.ndarray], config: Algorithm) -> None:
    if len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} groups but rewards for {len(rewards)}")
    if len(groups) < config.updates_per_batch:
        raise ValueError(f"{len(groups)} groups cannot be split into {config.updates_per_batch} updates")
    for group, rewards_G in zip(groups, rewards, strict=True):
        if len(group.trajectories) != len(rewards_G):
            raise ValueError(f"prompt {group.prompt.index}: {len(group.trajectories)} trajectories but "
                             f"{len(rewards_G)} rewards")

