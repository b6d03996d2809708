"""The complete token loss of a run: the choice of the old policy, the correction, the KL and the entropy term."""

from __future__ import annotations

import torch

from launch.config.schema import Algorithm
from megatron_rl.algorithms.corrections import mismatch_sums, truncated_importance_weight
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses import clipped_loss


def token_objective(config: Algorithm, logprobs_T: torch.Tensor, entropy_T: torch.Tensor | None,
                    advantages_T: torch.Tensor, weights_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                    old_logprobs_T: torch.Tensor | None,
                    reference_logprobs_T: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of T tokens, which is a part of the batch's loss, and their metrics:

        loss = sum_t weight_t (w_t L_t + beta KL_t - entropy_coef H_t)

    L is the clipped loss (`losses`), KL an estimate against the reference (`kl`), H the entropy, and w the importance
    weight from the sampling engine (mu) to pi_old (`corrections`). The configuration chooses pi_old:

    | `algorithm.old_logprobs` | optimizer steps per batch | mode | pi_old | w |
    |---|---|---|---|---|
    | none | 1 | on-policy | pi itself: the ratio is 1 and has a gradient | min(sg(pi)/mu, cap) |
    | none | > 1 | bypass | mu: the ratio is also the correction | 1 |
    | recompute | any | decoupled (arXiv:2110.00641) | the trainer's before the first update | min(pi_old/mu, cap) |

    The sum over all micro-batches and ranks is the loss of the batch. Its gradient is the one that a single device
    would compute, because `weights_T` already contains the normaliser (`aggregation`).

    Args:
        logprobs_T: log pi of the sampled tokens, with gradient, [T]; T may be 0.
        entropy_T: entropy of pi at these positions, [T]. Needed if `entropy_coef` is above 0.
        advantages_T, behaviour_logprobs_T: [T].
        weights_T: 0 for a token outside the loss (prompt, padding, masked). The values of the other tensors at such a
            token are never used, finite or not.
        old_logprobs_T: given if and only if `config.old_logprobs` is `recompute`.
        reference_logprobs_T: given if `config.kl.beta` is above 0.
    Returns:
        The loss (float32 scalar), and float32 scalars without gradient, named as in `megatron_rl.monitor.metrics`:
        sums over the tokens with weight (divide by `train/tokens` after summing over micro-batches and ranks), and
        maxima, whose names end in `_max`. `mismatch/*` compares mu with pi_old if old log-probs are given, otherwise
        with pi. In the latter case it describes the engine only on the first update of a rollout batch, before pi
        changes (`MegatronTrainer.update` drops the others).
    Raises:
        ValueError: a tensor that the configuration needs is missing, or one that it excludes is given.
    """
    _check(config, entropy_T, old_logprobs_T, reference_logprobs_T)
    mask_T = weights_T != 0

    def in_loss(values_T: torch.Tensor) -> torch.Tensor:
        """float32, 0 outside the loss. A multiplied mask would let an inf or NaN of a prompt token through."""
        return torch.where(mask_T, values_T.float(), 0.0)

    logprobs_T, advantages_T = in_loss(logprobs_T), in_loss(advantages_T)
    behaviour_logprobs_T = in_loss(behaviour_logprobs_T)
    if old_logprobs_T is not None:
        old_logprobs_T = in_loss(old_logprobs_T)
        correction_T = truncated_importance_weight(old_logprobs_T, behaviour_logprobs_T, config.importance_cap)
    elif config.optimizer_steps == 1:
        old_logprobs_T = logprobs_T.detach()
        correction_T = truncated_importance_weight(old_logprobs_T, behaviour_logprobs_T, config.importance_cap)
    else:
        old_logprobs_T = behaviour_logprobs_T
        correction_T = torch.ones_like(logprobs_T)
    # The policy at the start of the update, if known. On later mini-batches pi has already changed.
    engine_twin_T = old_logprobs_T if config.old_logprobs == "recompute" else logprobs_T
    bypass = config.old_logprobs == "none" and config.optimizer_steps > 1

    clipped = clipped_loss(logprobs_T, old_logprobs_T, advantages_T, clip_low=config.clip_low,
                           clip_high=config.clip_high, dual_clip=config.dual_clip)
    loss_T = correction_T * clipped.loss_T
    per_token = {
        "train/ratio_mean": clipped.ratio_T,
        "train/clip_fraction_high": clipped.clipped_high_T,
        "train/clip_fraction_low": clipped.clipped_low_T,
        "train/dual_clip_fraction": clipped.clipped_dual_T,
        "mismatch/capped": _capped(correction_T, None if bypass else config.importance_cap),
    }
    if reference_logprobs_T is not None:
        reference_logprobs_T = in_loss(reference_logprobs_T)
        kl_T = kl_estimate(logprobs_T, reference_logprobs_T, config.kl.estimator)
        loss_T = loss_T + config.kl.beta * kl_T
        per_token["train/kl"] = kl_T
    if entropy_T is not None:
        entropy_T = in_loss(entropy_T)
        loss_T = loss_T - config.entropy_coef * entropy_T
        per_token["train/entropy"] = entropy_T

    sums = {"train/tokens": mask_T.sum().float()}
    sums |= {name: values_T.detach()[mask_T].sum() for name, values_T in per_token.items()}
    sums |= mismatch_sums(engine_twin_T, behaviour_logprobs_T, mask_T)
    sums["train/ratio_max"] = clipped.ratio_T[mask_T].max() if mask_T.any() else loss_T.new_zeros(())
    return (weights_T.float() * loss_T).sum(), sums


def _capped(correction_T: torch.Tensor, cap: float | None) -> torch.Tensor:
    return torch.zeros_like(correction_T) if cap is None else (correction_T >= cap).float()


def _check(config: Algorithm, entropy_T: torch.Tensor | None, old_logprobs_T: torch.Tensor | None,
           reference_logprobs_T: torch.Tensor | None) -> None:
    if (config.old_logprobs == "recompute") != (old_logprobs_T is not None):
        given = "missing" if old_logprobs_T is None else "given"
        raise ValueError(f"old log-probs are {given} with algorithm.old_logprobs: {config.old_logprobs}")
    if config.kl.beta > 0 and reference_logprobs_T is None:
        raise ValueError(f"reference log-probs are missing with algorithm.kl.beta: {config.kl.beta}")
    if config.entropy_coef > 0 and entropy_T is None:
        raise ValueError(f"the entropy is missing with algorithm.entropy_coef: {config.entropy_coef}")
