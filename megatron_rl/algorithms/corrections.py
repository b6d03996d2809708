"""The engine's log-probs against the trainer's: a correction of the loss, and how far apart the two are.

Four log-probs of one token must not be mixed up: behaviour mu (the engine that sampled it, at its weight version
and with its numerics), proximal pi_old (the trainer at the start of the update), current pi, and the reference.
mu and pi_old differ by numerics even with equal weights.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithms.ratios import clamped_exp, clamped_expm1


def truncated_importance_weight(old_logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                                cap: float | None) -> torch.Tensor:
    """Truncated importance sampling (TIS) from behaviour to proximal policy, per token:

        w = min(pi_old / mu, cap)

    (truncation: Ionides 2008; for the engine/trainer mismatch: Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training", 2025). `cap` None switches the correction off: w = 1.

    Returns:
        float32 [T], detached: a weight scales the gradient, it is no part of it.
    """
    if cap is None:
        return torch.ones_like(behaviour_logprobs_T, dtype=torch.float32)
    return clamped_exp(old_logprobs_T.detach().float() - behaviour_logprobs_T.float()).clamp(max=cap)


def mismatch_sums(logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                  mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far trainer (pi) and engine (mu) are apart on the tokens of `mask_T`, as sums that add up over ranks.

    Both must have the same weights: log-probs of a policy that has been updated since show its drift instead.

    - `mismatch/kl`: KL(mu || pi), the k3 estimate r - 1 - log r with r = pi/mu. The engine is the truth: it stays
      moderate (9) where pi gives a sampled token exp(-15) and mu exp(-5). The other way the same token yields 22,000
      and hides everything. Healthy: about 1e-3; a steep rise means that the weights are not arriving.
    - `mismatch/ratio_mean`: r, about 1 in the mean.
    - `mismatch/abs_mean` and `mismatch/abs_max`: |log pi - log mu|, to be summed and to be maximised.

    Args:
        logprobs_T, behaviour_logprobs_T: [T]. mask_T: bool [T].
    Returns:
        float32 scalars without gradient; divide the sums by the number of tokens in the mask.
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
