"""The complete token loss of a run: the choice of the old policy, the correction, the KL and the entropy term."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from launch.config.schema import Algorithm, Rejection
from megatron_rl.algorithms.corrections import importance_weight, in_band, interpolated_logprobs, near_or_positive
from megatron_rl.algorithms.distillation import teacher_advantages, teacher_loss
from megatron_rl.algorithms.kl import kl_estimate
from megatron_rl.algorithms.losses import PolicyLoss, cispo_loss, clipped_loss, gspo_loss
from megatron_rl.algorithms.mismatch import correction_sums, drift_sums, masked_max, masked_sum, mismatch_sums
from megatron_rl.algorithms.ratios import clamped_exp
from megatron_rl.algorithms.sequences import Sequences


def token_objective(config: Algorithm, logprobs_T: torch.Tensor, entropy_T: torch.Tensor | None,
                    advantages_T: torch.Tensor, weights_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                    old_logprobs_T: torch.Tensor | None, reference_logprobs_T: torch.Tensor | None,
                    ages_T: torch.Tensor, positions_T: torch.Tensor, sequences: Sequences,
                    teacher_logprobs_T: torch.Tensor | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of T tokens, which is a part of the batch's loss, and their metrics:

        loss = sum_t weight_t (keep_t w_t L_t + beta KL_t - entropy_coef H_t)

    L is the policy loss (`losses`), KL an estimate against the reference (`kl`), H the entropy, w the importance weight
    from the sampling engine (mu) to pi_old, and keep is 0 for a rejected token (`corrections`). A teacher adds to the
    advantage or to the loss (`distillation`). The configuration chooses pi_old:

    | `algorithm.old_logprobs` | optimizer steps per batch | mode | pi_old | w |
    |---|---|---|---|---|
    | none | 1 | on-policy | pi itself: the ratio is 1 and has a gradient | min(sg(pi)/mu, cap) |
    | none | > 1 | bypass | mu: the ratio is also the correction | 1 |
    | recompute | any | decoupled (arXiv:2110.00641) | the trainer's before the first update | min(pi_old/mu, cap) |
    | interpolate | any | decoupled, approximately (A-3PO) | between mu and sg(pi), by age | min(pi_old/mu, cap) |

    The sum over all micro-batches and ranks, divided once by the normaliser (`aggregation`), is the loss of the batch.
    Its gradient is the one that a single device would compute.

    Args:
        logprobs_T: log pi of the sampled tokens, with gradient, [T]; T may be 0.
        entropy_T: entropy of pi at these positions, [T]. Needed if `entropy_coef` is above 0; otherwise a metric
            without gradient.
        advantages_T, behaviour_logprobs_T: [T].
        weights_T: 0 for a token outside the loss (prompt, padding, masked). The values of the other tensors at such a
            token are never used, finite or not.
        old_logprobs_T: given if and only if `config.old_logprobs` is `recompute`.
        reference_logprobs_T: given if `config.kl.beta` is above 0.
        ages_T: number of versions between the token's and the one at the start of the step, int64 [T].
        positions_T: position in the completion, int64 [T].
        sequences: which tokens belong together. Used, collectively, only by what has a quantity of the sequence.
        teacher_logprobs_T: given if and only if `config.distillation` has a teacher.
    Returns:
        The loss (float32 scalar), and float32 scalars without gradient: sums over the tokens with weight, which
        `mismatch.means` turns into metrics after summing over micro-batches and ranks, and maxima, whose names end in
        `_max`. `mismatch/*` and `drift/*` compare mu with pi_old if old log-probs are given, otherwise with pi. In the
        latter case they describe the engine only on the first update of a rollout batch, before pi changes
        (`MegatronTrainer.update` drops the others).
    Raises:
        ValueError: a tensor that the configuration needs is missing, or one that it excludes is given.
    """
    _check(config, entropy_T, old_logprobs_T, reference_logprobs_T, teacher_logprobs_T)
    mask_T = weights_T != 0

    def in_loss(values_T: torch.Tensor) -> torch.Tensor:
        """float32, 0 outside the loss. A multiplied mask would let an inf or NaN of a prompt token through."""
        return torch.where(mask_T, values_T.float(), 0.0)

    logprobs_T, advantages_T = in_loss(logprobs_T), in_loss(advantages_T)
    behaviour_logprobs_T = in_loss(behaviour_logprobs_T)
    given_T = None if old_logprobs_T is None else in_loss(old_logprobs_T)
    old_logprobs_T = _proximal(config, logprobs_T, behaviour_logprobs_T, given_T, ages_T)
    apart = _Apart(logprobs_T.detach(), old_logprobs_T, behaviour_logprobs_T, mask_T, sequences)
    if teacher_logprobs_T is not None:
        teacher_logprobs_T = in_loss(teacher_logprobs_T)
        if config.distillation.form == "advantage":
            advantages_T = advantages_T + teacher_advantages(config.distillation, old_logprobs_T, teacher_logprobs_T)
    policy = _policy_loss(config, logprobs_T, old_logprobs_T, advantages_T, apart)
    loss_T, correction = _corrected(config, policy.loss_T, advantages_T, ages_T, mask_T, apart)
    per_token = {
        "train/ratio_mean": policy.ratio_T,
        "train/clip_fraction_high": policy.clipped_high_T,
        "train/clip_fraction_low": policy.clipped_low_T,
        "train/dual_clip_fraction": policy.clipped_dual_T,
    }
    if reference_logprobs_T is not None:
        reference_logprobs_T = in_loss(reference_logprobs_T)
        kl_T = kl_estimate(logprobs_T, reference_logprobs_T, config.kl.estimator)
        loss_T = loss_T + config.kl.beta * kl_T
        per_token["train/kl"] = kl_T
    if teacher_logprobs_T is not None:
        if config.distillation.form == "loss":
            loss_T = loss_T + teacher_loss(config.distillation, logprobs_T, teacher_logprobs_T)
        per_token |= {"distill/kl": kl_estimate(logprobs_T, teacher_logprobs_T, "k1"),
                      "distill/teacher_logprob": teacher_logprobs_T}
    if entropy_T is not None:
        if config.entropy_coef > 0:
            entropy_T = in_loss(entropy_T)
            loss_T = loss_T - config.entropy_coef * entropy_T
        per_token["train/entropy"] = entropy_T

    # The policy at the start of the update, if known. On later mini-batches pi has already changed.
    engine_twin_T = logprobs_T if given_T is None else given_T
    sums = {"train/tokens": mask_T.sum().float()}
    sums |= {name: masked_sum(values_T, mask_T) for name, values_T in per_token.items()}
    sums |= correction
    sums |= mismatch_sums(engine_twin_T, behaviour_logprobs_T, mask_T & (ages_T == 0))
    sums |= drift_sums(engine_twin_T, behaviour_logprobs_T, ages_T, positions_T, mask_T)
    sums["train/ratio_max"] = masked_max(policy.ratio_T, mask_T)
    return (weights_T.float() * loss_T).sum(), sums


def is_bypass(config: Algorithm) -> bool:
    """Whether the engine's log-probs are the old ones: the ratio is the correction, and there is no other."""
    return config.old_logprobs == "none" and config.optimizer_steps > 1


def _proximal(config: Algorithm, logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
              given_T: torch.Tensor | None, ages_T: torch.Tensor) -> torch.Tensor:
    if given_T is not None:
        return given_T
    if config.old_logprobs == "interpolate":
        return interpolated_logprobs(logprobs_T, behaviour_logprobs_T, ages_T)
    return behaviour_logprobs_T if is_bypass(config) else logprobs_T.detach()


@dataclass(frozen=True)
class _OfSequence:
    """Quantities of the sequence of each token, equal for all its tokens, without gradient."""

    lengths_T: torch.Tensor
    """Number of tokens in the loss, at least 1."""
    behind_T: torch.Tensor
    """Sum of log pi_old - log mu."""
    update_mean_T: torch.Tensor
    """Mean of log pi - log pi_old."""
    drift_mean_T: torch.Tensor
    """Mean of log mu - log pi."""


class _Apart:
    """How far the three policies are apart on each token and, summed only if asked for, on its sequence."""

    def __init__(self, logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                 mask_T: torch.Tensor, sequences: Sequences) -> None:
        self.behind_T = old_logprobs_T - behaviour_logprobs_T
        """log pi_old - log mu."""
        self._logprobs_T, self._old_T, self._behaviour_T = logprobs_T, old_logprobs_T, behaviour_logprobs_T
        self._mask_T, self._sequences = mask_T, sequences

    @functools.cached_property
    def sequence(self) -> _OfSequence:
        """Collective over context parallelism."""
        lengths_T, behind_T, update_T, drift_T = self._sequences.sums(
            self._mask_T, self.behind_T, self._logprobs_T - self._old_T, self._behaviour_T - self._logprobs_T)
        lengths_T = lengths_T.clamp(min=1.0)
        return _OfSequence(lengths_T, behind_T, update_T / lengths_T, drift_T / lengths_T)


def _policy_loss(config: Algorithm, logprobs_T: torch.Tensor, old_logprobs_T: torch.Tensor,
                 advantages_T: torch.Tensor, apart: _Apart) -> PolicyLoss:
    if config.loss == "cispo":
        return cispo_loss(logprobs_T, old_logprobs_T, advantages_T, clip_high=config.clip_high)
    if config.loss == "gspo":
        return gspo_loss(logprobs_T, apart.sequence.update_mean_T, advantages_T, clip_low=config.clip_low,
                         clip_high=config.clip_high, dual_clip=config.dual_clip)
    return clipped_loss(logprobs_T, old_logprobs_T, advantages_T, clip_low=config.clip_low,
                        clip_high=config.clip_high, dual_clip=config.dual_clip)


def _corrected(config: Algorithm, loss_T: torch.Tensor, advantages_T: torch.Tensor, ages_T: torch.Tensor,
               mask_T: torch.Tensor, apart: _Apart) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy loss with weight and rejection, and what they did."""
    told = {}
    if not is_bypass(config):
        cap = config.importance_cap
        sequence = config.importance_weight == "sequence" and cap is not None
        log_ratio_T = apart.sequence.behind_T if sequence else apart.behind_T
        told["weight"] = clamped_exp(log_ratio_T)
        if config.importance_weight != "none" and cap is not None:
            weight_T = importance_weight(log_ratio_T, cap)
            told["capped"] = weight_T >= cap
            loss_T = weight_T * loss_T
    if config.rejection.rule != "none":
        kept_T = _kept(config.rejection, advantages_T, apart)
        told["rejected"] = ~kept_T
        loss_T = torch.where(kept_T, loss_T, 0.0)
        if config.rejection.rule != "icepop":
            told["sequences"] = 1.0 / apart.sequence.lengths_T
            told["rejected_sequences"] = torch.where(kept_T, 0.0, told["sequences"])
    return loss_T, correction_sums(told, ages_T, mask_T) if told else {}


def _kept(rejection: Rejection, advantages_T: torch.Tensor, apart: _Apart) -> torch.Tensor:
    if rejection.rule == "icepop":
        return in_band(apart.behind_T, *rejection.bounds)
    if rejection.rule == "sequence":
        return in_band(apart.sequence.behind_T, *rejection.bounds)
    if rejection.rule == "geometric":
        return in_band(apart.sequence.behind_T / apart.sequence.lengths_T, *rejection.bounds)
    if rejection.high is None:
        raise ValueError("algorithm.rejection.rule: off_policy needs algorithm.rejection.high")
    return near_or_positive(advantages_T, apart.sequence.drift_mean_T, rejection.high)


def _check(config: Algorithm, entropy_T: torch.Tensor | None, old_logprobs_T: torch.Tensor | None,
           reference_logprobs_T: torch.Tensor | None, teacher_logprobs_T: torch.Tensor | None) -> None:
    if (config.old_logprobs == "recompute") != (old_logprobs_T is not None):
        given = "missing" if old_logprobs_T is None else "given"
        raise ValueError(f"old log-probs are {given} with algorithm.old_logprobs: {config.old_logprobs}")
    if config.kl.beta > 0 and reference_logprobs_T is None:
        raise ValueError(f"reference log-probs are missing with algorithm.kl.beta: {config.kl.beta}")
    if (config.distillation.teacher is not None) != (teacher_logprobs_T is not None):
        given = "missing" if teacher_logprobs_T is None else "given"
        raise ValueError(f"the teacher's log-probs are {given} with algorithm.distillation.teacher: "
                         f"{config.distillation.teacher}")
    if config.entropy_coef > 0 and entropy_T is None:
        raise ValueError(f"the entropy is missing with algorithm.entropy_coef: {config.entropy_coef}")
