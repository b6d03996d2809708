"""Corrections of the policy loss for tokens that another policy sampled. A *weight* scales the loss of a token, a
*rejection* takes the token out. docs/corrections.md says when to use which.

Every token has four log-probs: behaviour mu (the engine that sampled the token, with its weight version and numerics),
proximal pi_old (the trainer at the start of the update), current pi, and the reference. mu and pi_old differ in
numerics even if the weights are equal, and more if the trainer was updated since the token was sampled.

None of these functions changes a normaliser: a rejected token counts in the denominator of the loss.
"""

from __future__ import annotations

import torch

from megatron_rl.algorithms.ratios import clamped_exp


def importance_weight(log_ratio_T: torch.Tensor, cap: float) -> torch.Tensor:
    """Truncated importance sampling (TIS) weight from the behaviour to the proximal policy:

        w = min(pi_old / mu, cap)

    - of a token: log_ratio = log pi_old - log mu (truncation: Ionides, "Truncated importance sampling", 2008; for the
      engine/trainer mismatch: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
      2025). Low variance, biased.
    - of a sequence: log_ratio is the sum of the same over the sequence, equal for all its tokens. Unbiased up to the
      truncation; the variance grows with the length.

    The log-ratio is clamped to +-20.

    Returns:
        float32 [T], detached: the weight scales the gradient and has none of its own.
    """
    return clamped_exp(log_ratio_T.detach()).clamp(max=cap)


def in_band(log_ratio_T: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Whether low <= exp(log_ratio) <= high, bool [T]. Others are rejected:

    - IcePop (arXiv:2510.18855): log_ratio = log pi_old - log mu of each token.
    - Sequence mask (masked importance sampling, MIS; Liu, Li et al., "When speed kills stability", 2025): its sum over
      the sequence.
    - Geometric mask: its mean over the sequence, which does not depend on the length. The ratio is the geometric mean.
    """
    ratio_T = clamped_exp(log_ratio_T.detach())
    return (ratio_T >= low) & (ratio_T <= high)


def near_or_positive(advantages_T: torch.Tensor, mean_drift_T: torch.Tensor, bound: float) -> torch.Tensor:
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): a sequence is rejected if its advantage
    is negative and the policy has left it,

        A < 0 and mean over its tokens of (log mu - log pi) > bound

    Args:
        mean_drift_T: that mean, the same for all tokens of a sequence, [T].
    Returns:
        bool [T]: whether the token stays.
    """
    return (advantages_T >= 0) | (mean_drift_T.detach() <= bound)


def interpolated_logprobs(logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                          ages_T: torch.Tensor) -> torch.Tensor:
    """Proximal log-probs without a pass of the trainer (A-3PO, arXiv:2512.06547):

        log pi_old = log mu + a (sg(log pi) - log mu),    a = (v_prox - v_behave) / (v_theta - v_behave)

    v_prox is the version at the start of the update and v_theta = v_prox + 1 the one that the update makes. With
    age = v_prox - v_behave, a = age / (age + 1): 0 for a token of the current version, whose old policy is then the
    engine's, and near 1 for a very old one.

    Args:
        ages_T: int64 [T].
    Returns:
        float32 [T], no gradient.
    """
    share_T = ages_T.float() / (ages_T.float() + 1.0)
    behaviour_logprobs_T = behaviour_logprobs_T.float()
    return behaviour_logprobs_T + share_T * (logprobs_T.detach().float() - behaviour_logprobs_T)
