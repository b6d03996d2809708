"""KL estimators against sums over a whole distribution in float64."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.algorithms.kl import kl_estimate

REFERENCE_V = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64), 0)
LOGITS_V = torch.tensor([0.5, 0.2, -0.3, 0.9, -1.1], dtype=torch.float64)


def expectation(kind: str) -> torch.Tensor:
    """E over pi of the estimator, exactly: every token once, weighted with its probability."""
    logprobs_V = torch.log_softmax(LOGITS_V, 0)
    return (logprobs_V.exp() * kl_estimate(logprobs_V, REFERENCE_V, kind).double()).sum()


def exact_kl(first_V: torch.Tensor, second_V: torch.Tensor) -> torch.Tensor:
    return (first_V.exp() * (first_V - second_V)).sum()


def expected_gradient(kind: str) -> torch.Tensor:
    """Gradient by the logits of the estimator as a loss, in expectation over tokens sampled (not differentiated)."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = torch.log_softmax(logits_V, 0)
    (logprobs_V.exp().detach() * kl_estimate(logprobs_V, REFERENCE_V, kind).double()).sum().backward()
    return logits_V.grad


def gradient_of(reverse: bool) -> torch.Tensor:
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = torch.log_softmax(logits_V, 0)
    (exact_kl(REFERENCE_V, logprobs_V) if reverse else exact_kl(logprobs_V, REFERENCE_V)).backward()
    return logits_V.grad


def test_k1_and_k3_are_unbiased_values():
    exact = exact_kl(torch.log_softmax(LOGITS_V, 0), REFERENCE_V).item()
    assert expectation("k1").item() == pytest.approx(exact, rel=1e-5)
    assert expectation("k3").item() == pytest.approx(exact, rel=1e-5)
    assert abs(expectation("k2").item() - exact) > 1e-3


def test_gradients_as_a_loss_are_what_the_docstring_says():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros_like(LOGITS_V), atol=1e-6, rtol=0)
    torch.testing.assert_close(expected_gradient("k2"), gradient_of(reverse=False), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(expected_gradient("k3"), gradient_of(reverse=True), atol=1e-6, rtol=1e-4)


def test_k3_is_never_negative_and_never_infinite():
    x_T = torch.tensor([-200.0, -30.0, -1.0, -1e-4, 0.0, 1e-4, 1.0, 30.0, 200.0], requires_grad=True)
    values_T = kl_estimate(x_T, torch.zeros(9), "k3")
    assert torch.isfinite(values_T).all() and (values_T[1:8] >= 0).all()
    values_T.sum().backward()
    assert torch.isfinite(x_T.grad).all()
    expected_T = torch.expm1(-x_T.detach()[2:7].double()) + x_T.detach()[2:7].double()
    torch.testing.assert_close(values_T[2:7].double(), expected_T, rtol=1e-3, atol=0)
