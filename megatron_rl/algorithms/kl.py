"""Estimators of KL(pi || pi_ref) from log-probs of sampled tokens (Schulman, "Approximating KL divergence", 2020).

With x = log pi(token) - log pi_ref(token) and tokens sampled from pi:

| | formula | as an estimate | expected gradient as a loss |
|---|---|---|---|
| k1 | x | unbiased, high variance, either sign | zero: no signal, so k1 belongs in the reward |
| k2 | x^2 / 2 | biased, low variance | the gradient of KL(pi || pi_ref) |
| k3 | exp(-x) - 1 + x | unbiased, never negative | the gradient of the reverse, KL(pi_ref || pi) |

GRPO uses k3 (arXiv:2402.03300, eq. 4). Near pi = pi_ref its gradient agrees with that of k2 to first order. The
estimators assume tokens of the current policy. On stale tokens the drift since sampling biases them.
"""

from __future__ import annotations

from typing import Literal

import torch

from megatron_rl.algorithms.ratios import clamped_expm1

KLKind = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_T: torch.Tensor, reference_logprobs_T: torch.Tensor, kind: KLKind) -> torch.Tensor:
    """Compute the estimate for every token, differentiable in `logprobs_T`.

    Args:
        logprobs_T: log pi of the sampled tokens, [T].
        reference_logprobs_T: log pi_ref of the same tokens, [T].
    Returns:
        float32 [T], finite for all finite inputs because the exponent of k3 is clamped to +-20.
    """
    x_T = logprobs_T.float() - reference_logprobs_T.float()
    if kind == "k1":
        return x_T
    if kind == "k2":
        return 0.5 * x_T.square()
    if kind == "k3":
        return clamped_expm1(-x_T) + x_T
    raise ValueError(f"unknown KL estimator {kind!r}")
