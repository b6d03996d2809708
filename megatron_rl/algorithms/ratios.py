"""Probability ratios from log-probs."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8: far above any clip range and far below overflow, even when multiplied by an advantage."""


def clamped_exp(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(log-ratio) in float32, with the log-ratio clamped to +-20 *before* the exponential.

    An inf becomes NaN when it is multiplied by 0 (a zero advantage, a mask, the backward pass of the branch that `min`
    did not take), even if the clipped branch wins (miles#1363, prime-rl#1329, NeMo-RL#876). Beyond the limit the
    gradient is 0.
    """
    return log_ratio_T.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clamped_expm1(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """`clamped_exp` minus 1 without cancellation. In float32 the error of exp(1e-4) - 1 - 1e-4 exceeds its value, and
    1e-4 is the order of the log-ratio between a healthy engine and its trainer."""
    return log_ratio_T.float().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1()
