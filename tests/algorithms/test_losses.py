"""The clipped loss: values and gradients against the formula written case by case in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.losses import clipped_loss

LOW, HIGH = 0.2, 0.28


def by_hand(logprob: float, old: float, advantage: float, dual: float | None) -> tuple[float, float]:
    """Loss and its derivative by the log-prob, from the definition: which branch wins decides both."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        active = ratio <= 1 + HIGH
        loss = -advantage * min(ratio, 1 + HIGH)
    else:
        active = ratio >= 1 - LOW
        loss = -advantage * max(ratio, 1 - LOW)
        if dual is not None and ratio > dual:
            active, loss = False, -advantage * dual
    return loss, -advantage * ratio if active else 0.0


@pytest.mark.parametrize("dual", [None, 3.0])
def test_values_and_gradients(dual):
    ratios = [0.01, 0.5, 0.79, 0.81, 1.0, 1.1, 1.27, 1.29, 2.0, 2.9, 3.1, 50.0]
    cases = [(math.log(ratio) - 2.0, -2.0, advantage) for ratio in ratios
             for advantage in (-1.5, -0.1, 0.0, 0.7, 3.0)]
    expected = torch.tensor([by_hand(*case, dual) for case in cases], dtype=torch.float64)
    logprobs_T = torch.tensor([case[0] for case in cases], requires_grad=True)
    old_T, advantages_T = torch.tensor([case[1] for case in cases]), torch.tensor([case[2] for case in cases])
    clipped = clipped_loss(logprobs_T, old_T, advantages_T, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    clipped.loss_T.sum().backward()
    torch.testing.assert_close(clipped.loss_T.detach().double(), expected[:, 0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logprobs_T.grad.double(), expected[:, 1], rtol=1e-5, atol=1e-7)
    no_gradient_T = (expected[:, 1] == 0) & (advantages_T != 0)
    clipped_T = clipped.clipped_high_T + clipped.clipped_low_T + clipped.clipped_dual_T
    torch.testing.assert_close(clipped_T, no_gradient_T.float())


def test_ratio_one_has_the_policy_gradient():
    """The tie between the two branches of the maximum must not halve the gradient."""
    logprobs_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages_T = torch.tensor([2.0, -1.0, 0.5])
    clipped_loss(logprobs_T, logprobs_T.detach(), advantages_T, clip_low=0.2, clip_high=0.2,
                 dual_clip=3.0).loss_T.sum().backward()
    torch.testing.assert_close(logprobs_T.grad, -advantages_T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_extreme_ratios_are_never_nan(dtype, dual):
    """A ratio of e^90 overflows float32; inf times an advantage of 0 would be NaN (miles#1363)."""
    log_ratios_T = torch.tensor([90.0, 90.0, 90.0, -90.0, -90.0, -90.0, 2000.0, -2000.0, 0.0], dtype=dtype)
    advantages_T = torch.tensor([0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0])
    logprobs_T = log_ratios_T.clone().requires_grad_()
    clipped = clipped_loss(logprobs_T, torch.zeros_like(log_ratios_T), advantages_T, clip_low=LOW, clip_high=HIGH,
                           dual_clip=dual)
    clipped.loss_T.sum().backward()
    assert clipped.loss_T.dtype == torch.float32
    assert torch.isfinite(clipped.loss_T).all() and torch.isfinite(logprobs_T.grad).all()
    assert (clipped.loss_T[advantages_T == 0] == 0).all()
    assert clipped.loss_T[1].item() == pytest.approx(-(1 + HIGH))
    assert clipped.loss_T[2].item() == pytest.approx(3.0 if dual else math.exp(20), rel=1e-5)
