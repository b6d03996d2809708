"""Losses and corrections: known answers of an independent program, and plain loops, through the whole objective."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from launch.config.schema import Algorithm
from megatron_rl.algorithms.mismatch import means
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.algorithms.sequences import Sequences
from tests.algorithms.plain_loops import Loss, Token, policy_loss

BEHAVIOUR = [[-2.061, -1.111, -0.331, -1.427, -0.351, -0.533, -1.351], [-0.806, -0.858, -0.325, -1.39], [-0.132],
             [-0.621, -1.971, -1.164, -0.792, -1.786, -0.807], [-0.594, -0.399, -0.26]]
OLD = [[-2.478, -1.198, 1.569, -1.602, -0.828, -0.628, -1.124], [-0.912, -1.128, -0.19, -1.192], [-0.032],
       [-0.526, -3.671, -1.566, -0.674, -1.467, -0.512], [-0.581, -0.737, 0.199]]
CURRENT = [[-2.625, -1.058, 1.556, -2.022, -0.774, -0.486, -1.401], [0.588, -0.919, -0.481, -1.892], [0.286],
           [-1.249, -4.166, -1.207, -0.601, -1.186, -0.308], [-0.927, -0.647, 0.268]]
ADVANTAGES = [1.3, -0.7, 0.4, -1.1, 0.9]
AGES = [[0, 0, 0, 1, 1, 2, 2], [3, 3, 3, 3], [0], [5, 5, 5, 5, 7, 7], [1, 1, 1]]
LENGTHS = [len(values) for values in BEHAVIOUR]
TOKENS = sum(LENGTHS)


def algorithm(**changes) -> Algorithm:
    return Algorithm.model_validate({"group_size": 2, "prompts_per_step": 2, "importance_weight": "none",
                                     "clip_high": 0.28, "old_logprobs": "recompute", **changes})


def weight_of(config: Algorithm, sequence: int) -> float:
    return (1 / (len(LENGTHS) * LENGTHS[sequence]) if config.aggregation == "sequence_mean" else 1 / TOKENS)


def objective(config: Algorithm, order: list[int] | None = None):
    """Loss, gradient and sums of the batch; its tokens in another order, as packing would have them."""
    number_T = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    order = list(range(TOKENS)) if order is None else order

    def flat(values: list[list[float]]) -> torch.Tensor:
        return torch.tensor([value for sequence in values for value in sequence])[order]

    number_T = torch.from_numpy(number_T)[order]
    logprobs_T = flat(CURRENT).requires_grad_()
    weights_T = torch.tensor([weight_of(config, i) for i in range(len(LENGTHS))])[number_T]
    loss, sums = token_objective(
        config, logprobs_T=logprobs_T, entropy_T=None, advantages_T=torch.tensor(ADVANTAGES)[number_T],
        weights_T=weights_T, behaviour_logprobs_T=flat(BEHAVIOUR),
        old_logprobs_T=flat(OLD) if config.old_logprobs == "recompute" else None, reference_logprobs_T=None,
        ages_T=flat(AGES), positions_T=torch.zeros(TOKENS, dtype=torch.int64),
        sequences=Sequences(number_T, len(LENGTHS)))
    loss.backward()
    gradient_T = torch.empty(TOKENS)
    gradient_T[order] = logprobs_T.grad
    return loss.item(), gradient_T, {name: value.item() for name, value in sums.items()}


def by_loops(config: Algorithm) -> Loss:
    return policy_loss(config, [
        [Token(CURRENT[i][t], BEHAVIOUR[i][t], ADVANTAGES[i], weight_of(config, i), OLD[i][t], AGES[i][t])
         for t in range(LENGTHS[i])] for i in range(len(LENGTHS))])


KNOWN = [
    ({}, 0.035016255),
    ({"dual_clip": 3.0}, -0.014373381),
    ({"importance_weight": "token"}, -0.00715468),
    ({"importance_weight": "token", "importance_cap": 5.0, "rejection": {"rule": "icepop"}}, 0.107400427),
    ({"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1}, -0.121711474),
    ({"loss": "cispo"}, -0.041883508),
]


@pytest.mark.parametrize("changes, answer", KNOWN, ids=[str(changes) for changes, _ in KNOWN])
def test_known_answers(changes, answer):
    assert objective(algorithm(**changes))[0] == pytest.approx(answer, abs=2e-7)


KEPT = [
    ({"rule": "sequence"}, [1, 1, 1, 0, 1]),
    ({"rule": "geometric", "low": 0.9, "high": 1.1}, [0, 1, 0, 0, 1]),
    ({"rule": "off_policy", "high": 0.1}, [1, 1, 1, 0, 1]),
]


@pytest.mark.parametrize("rejection, kept", KEPT, ids=[rejection["rule"] for rejection, _ in KEPT])
def test_which_sequences_stay(rejection, kept):
    """A rejected sequence has no gradient, the others have theirs unchanged: no normaliser moves."""
    _, gradient_T, sums = objective(algorithm(rejection=rejection, clip_low=0.9, clip_high=9.0))
    _, whole_T, _ = objective(algorithm(clip_low=0.9, clip_high=9.0))
    assert (whole_T != 0).all()
    keeps_T = torch.tensor(kept).repeat_interleave(torch.tensor(LENGTHS)) == 1
    torch.testing.assert_close(gradient_T, torch.where(keeps_T, whole_T, 0.0), rtol=0, atol=0)
    metrics = means(sums)
    assert metrics["correction/rejected_sequences"] == pytest.approx(1 - sum(kept) / 5)
    assert metrics["correction/rejected"] == pytest.approx(1 - keeps_T.float().mean().item())


def test_weights_of_sequences():
    known = [2.0, 0.957911, 1.105171, 0.279431, 1.143393]
    _, gradient_T, sums = objective(algorithm(importance_weight="sequence", clip_low=0.9, clip_high=9.0))
    _, plain_T, _ = objective(algorithm(clip_low=0.9, clip_high=9.0))
    weights_T = torch.tensor(known).repeat_interleave(torch.tensor(LENGTHS))
    torch.testing.assert_close(gradient_T / plain_T, weights_T, rtol=1e-5, atol=0)
    assert means(sums)["correction/capped"] == pytest.approx(7 / TOKENS)


def test_effective_sample_size_and_divergence_before_the_cap():
    metrics = means(objective(algorithm(importance_weight="token", importance_cap=1.01))[2])
    assert metrics["correction/ess"] == pytest.approx(0.495546906, rel=1e-5)
    assert metrics["drift/divergence"] == pytest.approx(0.513138877, rel=1e-5)


EVERYTHING = [
    {"old_logprobs": mode, "updates_per_batch": updates, **changes}
    for mode, updates in (("none", 1), ("none", 2), ("recompute", 2), ("interpolate", 1))
    for changes in (
        {"importance_weight": "token", "importance_cap": 1.5}, {"importance_weight": "sequence"},
        {"loss": "gspo", "aggregation": "sequence_mean", "dual_clip": 1.4}, {"loss": "cispo", "epochs": 2},
        {"importance_weight": "token", "importance_cap": 3.0, "rejection": {"rule": "icepop", "low": 0.6, "high": 3.0}},
        {"importance_weight": "sequence", "rejection": {"rule": "sequence", "low": 0.4, "high": 2.5}},
        {"rejection": {"rule": "geometric", "low": 0.9, "high": 1.1}},
        {"rejection": {"rule": "off_policy", "high": 0.1}, "loss": "cispo"})]


@pytest.mark.parametrize("changes", EVERYTHING, ids=[" ".join(f"{k}={v}" for k, v in c.items()) for c in EVERYTHING])
def test_value_gradient_and_shares_are_those_of_plain_loops(changes):
    """In every mode, whatever the order in which tokens are packed."""
    config = algorithm(**changes)
    order = np.random.default_rng(0).permutation(TOKENS).tolist()
    loss, gradient_T, sums = objective(config, order)
    truth = by_loops(config)
    assert loss == pytest.approx(truth.value, rel=2e-5, abs=1e-7)
    slopes_T = torch.tensor([slope for sequence in truth.slopes for slope in sequence])
    torch.testing.assert_close(gradient_T, slopes_T, rtol=2e-5, atol=1e-7)
    metrics = means(sums)
    kept = np.array([keep for sequence in truth.kept for keep in sequence])
    ages = np.array([age for sequence in AGES for age in sequence])
    shares = np.repeat([1 / length for length in LENGTHS], LENGTHS)     # of its sequence, by token
    weights = np.array([w for sequence in truth.weights for w in sequence])
    assert ("correction/rejected" in metrics) == (config.rejection.rule != "none")
    assert ("correction/rejected_sequences" in metrics) == (config.rejection.rule not in ("none", "icepop"))
    for name, part in (("", ages >= 0), ("/age_0", ages == 0), ("/age_2", ages == 2), ("/age_4_up", ages >= 4)):
        if "correction/rejected" in metrics:
            assert metrics[f"correction/rejected{name}"] == pytest.approx(1 - kept[part].mean())
        if "correction/rejected_sequences" in metrics:
            expected = shares[part & ~kept].sum() / shares[part].sum()
            assert metrics[f"correction/rejected_sequences{name}"] == pytest.approx(expected, abs=1e-6)
        if "correction/weight" in sums:
            w = weights[part]
            assert metrics[f"correction/ess{name}"] == pytest.approx(w.sum()**2 / (len(w) * (w**2).sum()), rel=1e-4)


def test_gspo_is_the_policy_gradient_of_the_sequence_ratio():
    """-A s / (l B) for each token (arXiv:2507.18071, eq. 10), 0 for a clipped sequence."""
    config = algorithm(loss="gspo", aggregation="sequence_mean", clip_low=0.1, clip_high=0.1)
    _, gradient_T, _ = objective(config)
    expected = []
    for i, length in enumerate(LENGTHS):
        s = math.exp(sum(CURRENT[i][t] - OLD[i][t] for t in range(length)) / length)
        clipped = (ADVANTAGES[i] > 0 and s > 1.1) or (ADVANTAGES[i] < 0 and s < 0.9)
        expected += [0.0 if clipped else -ADVANTAGES[i] * s / (length * 5)] * length
    assert 0.0 in expected and len(set(expected)) > 3
    torch.testing.assert_close(gradient_T, torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_clipped_token_of_cispo_keeps_its_gradient():
    """Where PPO gives none: A > 0 and a ratio of 1.52."""
    cispo, ppo = (objective(algorithm(loss=loss, clip_high=0.2))[1] for loss in ("cispo", "ppo"))
    at = sum(LENGTHS[:2])
    assert ppo[at] == 0
    assert cispo[at].item() == pytest.approx(-1.2 * ADVANTAGES[2] / TOKENS, rel=1e-6)


def test_sums_over_a_sequence_on_two_ranks():
    """Each rank has some tokens of every sequence, as under context parallelism."""
    number_T = torch.tensor([0, 0, 1, 2, 2, 2, 2])
    values_T, ones_T = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]), torch.ones(7)
    parts = [torch.tensor([0, 3, 4]), torch.tensor([1, 2, 5, 6])]
    sums_KS = torch.zeros(2, 3, dtype=torch.float64)

    def collect(part_KS: torch.Tensor) -> torch.Tensor:
        sums_KS.add_(part_KS)
        return part_KS

    for part in parts:
        Sequences(number_T[part], 3, collect).sums(values_T[part], ones_T[part])
    for part in parts:
        total_T, count_T = Sequences(number_T[part], 3, lambda _: sums_KS).sums(values_T[part], ones_T[part])
        torch.testing.assert_close(total_T, torch.tensor([3.0, 3.0, 4.0, 120.0, 120.0, 120.0, 120.0])[part])
        torch.testing.assert_close(count_T, torch.tensor([2.0, 2.0, 1.0, 4.0, 4.0, 4.0, 4.0])[part])
