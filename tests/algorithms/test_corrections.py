"""Importance weights."""

from __future__ import annotations

import math

import torch

from megatron_rl.algorithms.corrections import importance_weight, in_band, interpolated_logprobs, near_or_positive


def test_weight_is_truncated_from_above_only_and_carries_no_gradient():
    log_ratio_T = torch.tensor([0.0, 0.5, 8.0, -4.0, 300.0], requires_grad=True)
    weight_T = importance_weight(log_ratio_T, 2.0)
    assert not weight_T.requires_grad
    torch.testing.assert_close(weight_T, torch.tensor([1.0, math.exp(0.5), 2.0, math.exp(-4.0), 2.0]))


def test_bands_hold_their_bounds():
    ratios = [0.49, 0.5, 1.0, 5.0, 5.01, 0.0]
    log_ratio_T = torch.tensor([math.log(r) if r else -math.inf for r in ratios])
    assert in_band(log_ratio_T, 0.5 - 1e-6, 5.0 + 1e-5).tolist() == [False, True, True, True, False, False]


def test_only_a_negative_sequence_can_be_too_far():
    advantages_T, drift_T = torch.tensor([1.0, 0.0, -1.0, -1.0, -1.0]), torch.tensor([9.0, 9.0, 0.2, 0.21, -9.0])
    assert near_or_positive(advantages_T, drift_T, 0.2).tolist() == [True, True, True, False, True]


def test_the_interpolated_policy_moves_from_the_engine_to_the_trainer_with_age():
    current_T = torch.full((5,), -1.0, requires_grad=True)
    old_T = interpolated_logprobs(current_T, torch.full((5,), -3.0), torch.tensor([0, 1, 2, 3, 1999]))
    assert not old_T.requires_grad
    torch.testing.assert_close(old_T, torch.tensor([-3.0, -2.0, -3 + 4 / 3, -1.5, -1.001]))
