"""How far the sampling policy and the trainer are apart, as sums that add up over micro-batches and ranks.

Two things are kept apart by the age of a token, the number of versions between its weights and the trainer's at the
start of the step. Age 0: equal weights, so a difference is numerics, or weights that did not arrive (`mismatch/*`).
Age 1 and more: the policy was updated since (`drift/*`).

The mean `family/what/part` divides by the count `family/tokens/part`; `means` knows the exceptions. A sequence whose
tokens have several ages counts at each of them with its share of tokens.
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
    log_ratio_T = (logprobs_T.detach().float() - behaviour_logprobs_T.float())[mask_T]
    ratio_T = clamped_exp(log_ratio_T)
    abs_diff_T = log_ratio_T.abs()
    return {
        "mismatch/tokens": mask_T.sum().float(),
        "mismatch/kl": (clamped_expm1(log_ratio_T) - log_ratio_T).sum(),
        "mismatch/ratio_mean": ratio_T.sum(),
        "mismatch/abs_mean": abs_diff_T.sum(),
        "mismatch/abs_max": abs_diff_T.max() if abs_diff_T.numel() else abs_diff_T.new_zeros(()),
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
    log_ratio_T = (logprobs_T.detach().float() - behaviour_logprobs_T.float())[mask_T]
    ages_T, old_T = ages_T[mask_T], ages_T[mask_T] > 0
    change_T = clamped_expm1(log_ratio_T)
    values = {"tokens": torch.ones_like(log_ratio_T), "kl": change_T - log_ratio_T, "abs_mean": log_ratio_T.abs()}
    by_age = _sums(_age_of(ages_T), len(AGES), values)
    edges = torch.tensor(_EDGES, device=positions_T.device)
    place_T = torch.bucketize(positions_T[mask_T], edges, right=True)
    by_place = _sums(place_T + len(POSITIONS) * old_T, 2 * len(POSITIONS), values)
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
    values = {what: each_T[mask_T].float() for what, each_T in values_T.items()}
    values["tokens"] = torch.ones_like(ages_T[mask_T], dtype=torch.float32)
    if "weight" in values:
        values["weight_squared"] = values["weight"].square()
    by_age = _sums(_age_of(ages_T[mask_T]), len(AGES), values)
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


def _age_of(ages_T: torch.Tensor) -> torch.Tensor:
    return ages_T.clamp(0, len(AGES) - 1)


def _sums(bucket_T: torch.Tensor, count: int, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums of each value over the tokens of each bucket. A product with indicators: scattered additions would have no
    fixed order on a GPU."""
    indicators_CT = (bucket_T == torch.arange(count, device=bucket_T.device)[:, None]).double()
    sums_CK = indicators_CT @ torch.stack(list(values.values()), dim=1).double()
    return dict(zip(values, sums_CK.float().unbind(1), strict=True))
