"""Advantages of the trajectories of a rollout batch. NumPy, on the driver.

A *group* is the set of trajectories drawn for one prompt instance. Group sizes may differ (aborted or filtered
samples). A group is one object from the engine onwards, so no trajectory can end up in another group, whatever the
order in which groups return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

AdvantageKind = Literal["grpo", "grpo_no_std", "rloo"]
"""The kinds that need only the group."""

STD_EPSILON = 1e-6
"""Added to the group's standard deviation. This value and the n - 1 in the variance follow verl."""
WHITENING_EPSILON = 1e-8
"""Added to the variance of a whitened batch, as in verl."""


def group_advantages(rewards: Sequence[np.ndarray], kind: AdvantageKind) -> list[np.ndarray]:
    """Compute the advantages of every group. R are the rewards of one group of n trajectories:

    - `grpo`:        A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with n - 1 (GRPO, arXiv:2402.03300, section 4.1.2)
    - `grpo_no_std`: A_i = R_i - mean(R) (Dr. GRPO, arXiv:2503.20783)
    - `rloo`:        A_i = R_i - mean of the other n - 1 rewards = n/(n - 1) (R_i - mean(R)) (RLOO, arXiv:2402.14740)

    A group with equal rewards or a single member gets exactly 0, because it does not show which trajectory is better.

    Args:
        rewards: one array [n] per group. Sizes may differ.
    Returns:
        float32 [n] per group, in the given order. Computed in float64.
    Raises:
        ValueError: a group is empty, or a reward is not finite.
    """
    return [_advantages(_checked(rewards_G), kind) for rewards_G in rewards]


def whitened_advantages(rewards: Sequence[np.ndarray], tokens: Sequence[np.ndarray], *,
                        baseline: bool) -> list[np.ndarray]:
    """Compute the advantages of REINFORCE++ (arXiv:2501.03262), whitened over all tokens of the rollout batch:

        A_i = (R_i - mean) / sqrt(variance + 1e-8)

    with mean and variance (n - 1) over the tokens, each with the reward of its trajectory, so that a long trajectory
    counts more. Whitening needs the whole batch, so it comes before any split over mini-batches and ranks. Rewards come
    at the end and are not discounted; a KL term belongs to the loss (`algorithm.kl`), not to the reward.

    Args:
        tokens: number of tokens in the loss, per trajectory, int [n] per group.
        baseline: use R_i - mean of the group in place of R_i (REINFORCE++-baseline).
    Returns:
        float32 [n] per group, all 0 if the whole batch has one value. Computed in float64.
    Raises:
        ValueError: as `group_advantages`.
    """
    values = [_checked(rewards_G) for rewards_G in rewards]
    if baseline:
        values = [np.zeros_like(rewards_G) if is_flat(rewards_G) else rewards_G - rewards_G.mean()
                  for rewards_G in values]
    values_B, tokens_B = np.concatenate(values), np.concatenate(tokens).astype(np.float64)
    count = tokens_B.sum()
    if count < 2 or is_flat(values_B[tokens_B > 0]):
        return [np.zeros(len(values_G), dtype=np.float32) for values_G in values]
    mean = (tokens_B * values_B).sum() / count
    variance = (tokens_B * (values_B - mean) ** 2).sum() / (count - 1)
    return [((values_G - mean) / np.sqrt(variance + WHITENING_EPSILON)).astype(np.float32) for values_G in values]


def is_flat(rewards_G: np.ndarray) -> bool:
    """Whether the rewards of a group are all equal, up to the rounding of a weighted sum of components."""
    return bool(np.ptp(rewards_G) <= 1e-9 * max(1.0, float(np.abs(rewards_G).max())))


def group_metrics(rewards: Sequence[np.ndarray]) -> dict[str, float]:
    """How much the policy can learn from the groups, by metric name. `monitor.metrics` says what each one means.

    Raises:
        ValueError: there are no groups, a group is empty, or a reward is not finite.
    """
    if not rewards:
        raise ValueError("no groups")
    groups = [_checked(rewards_G) for rewards_G in rewards]
    values = {
        "group/zero_variance": [is_flat(rewards_G) for rewards_G in groups],
        "group/all_right": [rewards_G.min() >= 1.0 for rewards_G in groups],
        "group/all_wrong": [rewards_G.max() <= 0.0 for rewards_G in groups],
        "group/reward_std": [rewards_G.std(ddof=1) if len(rewards_G) > 1 else 0.0 for rewards_G in groups],
    }
    return {name: float(np.mean(of_groups)) for name, of_groups in values.items()}


def _checked(rewards_G: np.ndarray) -> np.ndarray:
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if rewards_G.ndim != 1 or rewards_G.size == 0:
        raise ValueError(f"a group needs a non-empty 1-D array of rewards, found shape {rewards_G.shape}")
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards of a group are not finite: {rewards_G.tolist()}")
    return rewards_G


def _advantages(rewards_G: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    size = len(rewards_G)
    if size == 1 or is_flat(rewards_G):
        return np.zeros(size, dtype=np.float32)
    centred_G = rewards_G - rewards_G.mean()
    if kind == "grpo":
        centred_G = centred_G / (rewards_G.std(ddof=1) + STD_EPSILON)
    elif kind == "rloo":
        centred_G = centred_G * (size / (size - 1))
    elif kind != "grpo_no_std":
        raise ValueError(f"unknown advantage {kind!r}")
    return centred_G.astype(np.float32)
