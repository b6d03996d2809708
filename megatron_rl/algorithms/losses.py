"""The policy-gradient losses of one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.algorithms.ratios import clamped_exp


@dataclass(frozen=True)
class PolicyLoss:
    """All float32 [T]; only `loss_T` carries a gradient. The indicators are 0 or 1."""

    loss_T: torch.Tensor
    ratio_T: torch.Tensor
    clipped_high_T: torch.Tensor
    """The ratio is above 1 + clip_high, and (not CISPO) A > 0: no gradient."""
    clipped_low_T: torch.Tensor
    """A < 0 and the ratio is below 1 - clip_low: no gradient."""
    clipped_dual_T: torch.Tensor
    """A < 0 and the ratio is above the dual clip: no gradient."""


def clipped_loss(logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, advantages_T: torch.Tensor, *,
                 clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated, with r = pi / pi_old:

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

    `clip_high` > `clip_low` is DAPO's clip-higher (arXiv:2503.14476, section 3.1). With `dual_clip` = c
    (arXiv:1912.09729, eq. 5), for A < 0:

        L = min(L, c |A|)

    so that one bad token with a large ratio cannot dominate the batch.

    Args:
        logprobs_T: log pi of the sampled tokens, [T].
        old_logprobs_T: log pi_old of the same tokens, [T], no gradient.
        advantages_T: A, [T], no gradient.
    """
    advantages_T = advantages_T.float()
    ratio_T = clamped_exp(logprobs_T.float() - old_logprobs_T.float())
    loss_T = torch.maximum(-advantages_T * ratio_T,
                           -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high))
    ratio_T = ratio_T.detach()
    negative_T = advantages_T < 0
    clipped_dual_T = torch.zeros_like(ratio_T)
    if dual_clip is not None:
        clipped_dual_T = (negative_T & (ratio_T > dual_clip)).float()
        loss_T = torch.where(negative_T, torch.minimum(loss_T, dual_clip * advantages_T.abs()), loss_T)
    return PolicyLoss(
        loss_T=loss_T,
        ratio_T=ratio_T,
        clipped_high_T=((advantages_T > 0) & (ratio_T > 1.0 + clip_high)).float(),
        clipped_low_T=(negative_T & (ratio_T < 1.0 - clip_low)).float(),
        clipped_dual_T=clipped_dual_T,
    )


def gspo_loss(logprobs_T: torch.Tensor, sequence_log_ratio_T: torch.Tensor, advantages_T: torch.Tensor, *,
              clip_low: float, clip_high: float, dual_clip: float | None = None) -> PolicyLoss:
    """GSPO in its token form (arXiv:2507.18071, eq. 13 and 14): PPO's clipped loss of the sequence's ratio, with the
    gradient of each token's own log-prob,

        s_i = exp(mean over the sequence of (log pi - log pi_old)),    s_it = sg(s_i) exp(log pi - sg(log pi))

    With one advantage per sequence and the mean of sequence means, the gradient is that of the sequence form:
    -A s_i / (l_i B) for each token, 0 for a clipped sequence.

    Args:
        sequence_log_ratio_T: the mean of log pi - log pi_old over the token's sequence, [T].
    """
    log_ratio_T = sequence_log_ratio_T.detach() + (logprobs_T.float() - logprobs_T.detach().float())
    return clipped_loss(log_ratio_T, torch.zeros_like(log_ratio_T), advantages_T, clip_low=clip_low,
                        clip_high=clip_high, dual_clip=dual_clip)


def cispo_loss(logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, advantages_T: torch.Tensor, *,
               clip_high: float) -> PolicyLoss:
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): the clipped ratio is a constant weight of the log-prob, so
    that a clipped token keeps its gradient. There is no lower bound, as in the paper's experiments:

        L = -sg(min(r, 1 + clip_high)) A log pi,    r = pi / pi_old
    """
    ratio_T = clamped_exp(logprobs_T.detach().float() - old_logprobs_T.float())
    none_T = torch.zeros_like(ratio_T)
    return PolicyLoss(loss_T=-ratio_T.clamp(max=1.0 + clip_high) * advantages_T.float() * logprobs_T.float(),
                      ratio_T=ratio_T, clipped_high_T=(ratio_T > 1.0 + clip_high).float(), clipped_low_T=none_T,
                      clipped_dual_T=none_T)
