"""On-policy distillation: the reverse KL from the policy pi to a frozen teacher, on tokens that the policy sampled.

The reverse KL, KL(pi || teacher) = E over tokens of pi of (log pi - log teacher), is estimated from the sampled tokens
alone, so the teacher gives one number per token ("On-policy distillation", Thinking Machines, 2025; GKD,
arXiv:2306.13649, with lambda = 1 and the reverse KL; MiniLLM, arXiv:2306.08543). Each token counts by itself: later
tokens are not credited to earlier ones (a discount of 0, as in the first of these).

Both forms have the same expected gradient on-policy, coef times that of the reverse KL. They differ elsewhere: an
advantage goes through ratio, clip, importance weight and rejection like that of a reward, a loss does not.
"""

from __future__ import annotations

import torch

from launch.config.schema import Distillation
from megatron_rl.algorithms.kl import kl_estimate


def teacher_advantages(config: Distillation, old_logprobs_T: torch.Tensor,
                       teacher_logprobs_T: torch.Tensor) -> torch.Tensor:
    """What each token's advantage gains, the negative reverse KL as a reward of the token:

        A_t += -coef (log pi_old - log teacher)

    Not normalised over the group. `advantage: reinforce_pp` whitens before it.

    Returns:
        float32 [T], no gradient.
    """
    return -config.coef * kl_estimate(old_logprobs_T, teacher_logprobs_T, "k1").detach()


def teacher_loss(config: Distillation, logprobs_T: torch.Tensor, teacher_logprobs_T: torch.Tensor) -> torch.Tensor:
    """What each token's loss gains, with a gradient in `logprobs_T`:

        L_t += coef KL_t

    KL_t is the estimate `k2` or `k3` (`kl`) with the teacher as reference. The expected gradient of k2 is that of the
    reverse KL; that of k3 is the forward one's, KL(teacher || pi), equal to first order near the teacher.

    Returns:
        float32 [T].
    """
    return config.coef * kl_estimate(logprobs_T, teacher_logprobs_T, config.estimator)
