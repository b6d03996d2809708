"""Importance weights and the engine/trainer mismatch. test_objective.py has the sums over masks and micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.corrections import mismatch_sums, truncated_importance_weight


def test_weight_is_truncated_from_above_only_and_carries_no_gradient():
    old_T = torch.tensor([-1.0, -1.0, -1.0, -5.0, 0.0], requires_grad=True)
    behaviour_T = torch.tensor([-1.0, -1.5, -9.0, -1.0, -300.0])
    weight_T = truncated_importance_weight(old_T, behaviour_T, 2.0)
    assert not weight_T.requires_grad
    torch.testing.assert_close(weight_T, torch.tensor([1.0, math.exp(0.5), 2.0, math.exp(-4.0), 2.0]))
    torch.testing.assert_close(truncated_importance_weight(old_T, behaviour_T, None), torch.ones(5))


def test_kl_takes_the_engine_as_the_truth():
    """pi = exp(-15), mu = exp(-5) for one sampled token: about 9, not the 22,000 of the other direction."""
    mask_T = torch.ones(1, dtype=torch.bool)
    sums = mismatch_sums(torch.tensor([-15.0]), torch.tensor([-5.0]), mask_T)
    assert sums["mismatch/kl"].item() == pytest.approx(math.exp(-10) - 1 + 10, rel=1e-5)
    other = mismatch_sums(torch.tensor([-5.0]), torch.tensor([-15.0]), mask_T)
    assert other["mismatch/kl"].item() == pytest.approx(math.exp(10) - 1 - 10, rel=1e-5)


def test_kl_is_unbiased_over_a_distribution():
    pi_V = torch.log_softmax(torch.tensor([0.1, 1.0, -0.5, 0.3]), 0)
    mu_V = torch.log_softmax(torch.tensor([0.0, 0.8, -0.2, 0.5]), 0)
    exact = (mu_V.double().exp() * (mu_V - pi_V).double()).sum().item()
    one = torch.ones(1, dtype=torch.bool)
    estimate = sum(mu_V[v].exp().item() * mismatch_sums(pi_V[v:v + 1], mu_V[v:v + 1], one)["mismatch/kl"].item()
                   for v in range(4))
    assert estimate == pytest.approx(exact, rel=1e-4)
