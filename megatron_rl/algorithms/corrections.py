"""Mismatch between the engine's log-probs and the trainer's: a loss correction and its metrics.

Every token has four log-probs: behaviour mu (the engine that sampled the token, with its weight version and numerics),
proximal pi_old (the trainer at the start of the update), current pi, and the reference. mu and pi_old differ in
numerics even if the weights are equal.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithms.ratios import clamped_exp, clamped_expm1


def truncated_importance_weight(old_logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                                cap: float | None) -> torch.Tensor:
    """Truncated importance sampling (TIS) weight from the behaviour to the proximal policy, per token:

        w = min(pi_old / mu, cap)

    (truncation: Ionides 2008; for the engine/trainer mismatch: Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training", 2025). With `cap` None the correction is off: w = 1.

    Returns:
        float32 [T], detached: the weight scales the gradient and has none of its own.
    """
    if cap is None:
        return torch.ones_like(behaviour_logprobs_T, dtype=torch.float32)
    return clamped_exp(old_logprobs_T.detach().float() - behaviour_logprobs_T.float()).clamp(max=cap)


def mismatch_sums(logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                  mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure how far trainer (pi) and engine (mu) differ on the tokens in `mask_T`, as sums that add up over ranks.

    Both must have the same weights. If the trainer has been updated since, the sums measure its drift instead.

    - `mismatch/kl`: KL(mu || pi), the k3 estimate r - 1 - log r with r = pi/mu. This direction stays moderate (9) where
      a sampled token has probability exp(-15) under pi and exp(-5) under mu. The reverse direction gives 22,000 for
      that token and hides all others. A healthy value is about 1e-3. A steep rise means that the weights do not arrive.
    - `mismatch/ratio_mean`: r. The mean is about 1.
    - `mismatch/abs_mean` and `mismatch/abs_max`: the sum and the maximum of |log pi - log mu|.

    Args:
        logprobs_T, behaviour_logprobs_T: [T]. mask_T: bool [T].
    Returns:
        float32 scalars without gradient. Divide the sums by the number of tokens in the mask.
    """
    log_ratio_T = (logprobs_T.detach().float() - behaviour_logprobs_T.float())[mask_T]
    ratio_T = clamped_exp(log_ratio_T)
    abs_diff_T = log_ratio_T.abs()
    return {
        "mismatch/kl": (clamped_expm1(log_ratio_T) - log_ratio_T).sum(),
        "mismatch/ratio_mean": ratio_T.sum(),
        "mismatch/abs_mean": abs_diff_T.sum(),
        "mismatch/abs_max": abs_diff_T.max() if abs_diff_T.numel() else abs_diff_T.new_zeros(()),
    }
