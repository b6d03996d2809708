"""How far the sampling policy and the trainer are apart, as sums that add up over micro-batches and ranks.

Two things are kept apart by the age of a token, the number of versions between its weights and the trainer's at the
start of the step. Age 0: equal weights, so a difference is numerics, or weights that did not arrive (`mismatch/*`).
Age 1 and more: the policy was updated since (`drift/*`).

The mean `family/what/part` divides by the count `family/tokens/part`; `means` knows the exceptions. A sequence whose
tokens have several ages counts at each of them with its share of tokens.

Masks choose by `where`, never by an index: how many tokens an index leaves is known on the host only, so a GPU would
have to finish its queue first, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_rl.algorithms.ratios import clamped_exp, clamped_expm1

AGES = ("age_0", "age_1", "age_2", "age_3", "age_4_up")
POSITIONS = ("to_1k", "to_4k", "to_16k", "beyond")
"""Parts of a completion by the position of the token, from 0: below 1024, 4096, 16384, and the rest."""
_EDGES = (1024, 4096, 16384)
_OF_THE_BATCH = ("train/loss", "train/tokens")
"""Sums that are not means over tokens."""
_COUNTS = {"drift/divergence": "train/tokens", "distill/kl": "train/tokens",
           "distill/teacher_logprob": "train/tokens"}
_INTERNAL = ("tokens", "sequences", "weight", "weight_squared")
"""What `means` uses up, of every family except `train`."""


def mismatch_sums(logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor,
                  mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure how far trainer (pi) and engine (mu) differ on the tokens in `mask_T`, which have the same weights.

    - `mismatch/kl`: KL(mu || pi), the k3 estimate r - 1 - log r with r = pi/mu. This direction stays moderate (9) where
      a sampled token has probability exp(-15) under pi and exp(-5) under mu. The reverse direction gives 22,000 for
      that token and hides all others. A healthy value is about 1e-3. A steep rise means that the weights do not arrive.
    - `mismatch/ratio_mean`: r. The mean is about 1.
    - `mismatch/abs_mean` and `mismatch/abs_max`: the sum and the maximum of |log pi - log mu|.

    Args:
        logprobs_T, behaviour_logprobs_T: [T]. mask_T: bool [T].
    Returns:
        float32 scalars without gradient, with the count `mismatch/tokens`.
    """
    log_ratio_T = _log_ratio(logprobs_T, behaviour_logprobs_T, mask_T)
    abs_diff_T = log_ratio_T.abs()
    return {
        "mismatch/tokens": mask_T.sum().float(),
        "mismatch/kl": (clamped_expm1(log_ratio_T) - log_ratio_T).sum(),
        "mismatch/ratio_mean": masked_sum(clamped_exp(log_ratio_T), mask_T),
        "mismatch/abs_mean": abs_diff_T.sum(),
        "mismatch/abs_max": masked_max(abs_diff_T, mask_T),
    }


def drift_sums(logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor, ages_T: torch.Tensor,
               positions_T: torch.Tensor, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same differences on tokens of age 1 and more, by age and by position; `mismatch/*` by position; and the
    divergence, mean |pi/mu - 1| over all tokens in `mask_T`, which tells how much of the batch is off-policy.

    Args:
        ages_T, positions_T: int64 [T].
    Returns:
        As `mismatch_sums`: `drift/<tokens, kl, abs_mean>` with and without a part, `drift/divergence`.
    """
    log_ratio_T = _log_ratio(logprobs_T, behaviour_logprobs_T, mask_T)
    change_T = clamped_expm1(log_ratio_T)
    values = {"tokens": mask_T.float(), "kl": change_T - log_ratio_T, "abs_mean": log_ratio_T.abs()}
    by_age = _sums(_age_of(ages_T), len(AGES), values)
    place_T = sum((positions_T >= edge).long() for edge in _EDGES)      # a tensor of edges would be a copy to the GPU
    by_place = _sums(place_T + len(POSITIONS) * (ages_T > 0), 2 * len(POSITIONS), values)
    sums = {"drift/divergence": change_T.abs().sum()}
    for what in values:
        sums[f"drift/{what}"] = by_age[what][1:].sum()
        sums |= {f"drift/{what}/{part}": by_age[what][i] for i, part in enumerate(AGES) if i}
        sums |= {f"{family}/{what}/{part}": by_place[what][first + i] for i, part in enumerate(POSITIONS)
                 for family, first in (("mismatch", 0), ("drift", len(POSITIONS)))}
    return sums


def correction_sums(values_T: Mapping[str, torch.Tensor], ages_T: torch.Tensor,
                    mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the correction does to the tokens in `mask_T`, by age.

    Args:
        values_T: any of `weight` (the importance weight before the cap), `capped` and `rejected` (0 or 1), `sequences`
            (the token's share of its sequence) and `rejected_sequences` (the same, 0 if it is kept), each [T].
    Returns:
        `correction/<tokens, the same, weight_squared>` with and without an age.
    """
    values = {what: torch.where(mask_T, each_T.float(), 0.0) for what, each_T in values_T.items()}
    values["tokens"] = mask_T.float()
    if "weight" in values:
        values["weight_squared"] = values["weight"].square()
    by_age = _sums(_age_of(ages_T), len(AGES), values)
    return ({f"correction/{what}": value_T.sum() for what, value_T in values.items()}
            | {f"correction/{what}/{part}": by_age[what][i] for what in values for i, part in enumerate(AGES)})


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an update from the sums over all its tokens, named as in `megatron_rl.monitor.metrics`.

    A mean over no tokens is absent, never 0. The effective sample size of n weights is (sum w)^2 / (n sum w^2), as a
    share of n: 1 if all weights are equal, 1/n if one outweighs all others (Kong, "A note on importance sampling using
    standardized weights", 1992). Shares by age are absent if all tokens have age 0.
    """
    metrics: dict[str, float] = {}
    for name, value in sums.items():
        family, what, *part = name.split("/")
        if family != "train" and what in _INTERNAL or (family == "correction" and part and not sums["drift/tokens"]):
            continue
        counted = "sequences" if what == "rejected_sequences" else "tokens"
        count = sums[_COUNTS.get(name, "train/tokens" if family == "train" else "/".join([family, counted, *part]))]
        if name in _OF_THE_BATCH or (name.endswith("_max") and count):
            metrics[name] = value
        elif count or family == "train":
            metrics[name] = value / (count or 1.0)
    for end in ("", *(f"/{age}" for age in AGES if sums.get("drift/tokens"))):
        if squares := sums.get(f"correction/weight_squared{end}"):
            metrics[f"correction/ess{end}"] = (sums[f"correction/weight{end}"]**2
                                               / (sums[f"correction/tokens{end}"] * squares))
    return metrics


def masked_sum(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens in `mask_T`; what stands at the others is not used, finite or not. No gradient."""
    return torch.where(mask_T, values_T.detach(), 0.0).sum()


def masked_max(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Largest of values that are not negative, over the tokens in `mask_T`; 0 without any. No gradient."""
    if not len(values_T):
        return values_T.new_zeros(())
    return torch.where(mask_T, values_T.detach(), 0.0).amax()


def _log_ratio(logprobs_T: torch.Tensor, behaviour_logprobs_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """log pi - log mu, 0 outside the mask."""
    return torch.where(mask_T, logprobs_T.detach().float() - behaviour_logprobs_T.float(), 0.0)


def _age_of(ages_T: torch.Tensor) -> torch.Tensor:
    return ages_T.clamp(0, len(AGES) - 1)


def _sums(bucket_T: torch.Tensor, count: int, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums of each value, 0 outside the mask, over the tokens of each bucket. A product with indicators: scattered
    additions would have no fixed order on a GPU."""
    indicators_CT = (bucket_T == torch.arange(count, device=bucket_T.device)[:, None]).double()
    sums_CK = indicators_CT @ torch.stack(list(values.values()), dim=1).double()
    return dict(zip(values, sums_CK.float().unbind(1), strict=True))
