"""Probability ratios from log-probs."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8: far past any clip range, far below what overflows, also after a product with an advantage."""


def clamped_exp(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(log-ratio) in float32, the log-ratio clamped to +-20 *before* the exponential.

    An overflow to inf is NaN as soon as something multiplies it by 0 (a zero advantage, a mask, the backward of the
    branch that `min` did not take), even where the clipped branch wins (miles#1363, prime-rl#1329, NeMo-RL#876).
    Past the limit the gradient is 0.
    """
    return log_ratio_T.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clamped_expm1(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """`clamped_exp` minus 1 without the cancellation: in float32, exp(1e-4) - 1 - 1e-4 is off by more than its value,
    and that is the size of the difference between a healthy engine and its trainer."""
    return log_ratio_T.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1()
