"""How far engine and trainer are apart: numerics on tokens of equal weights, drift on older ones."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.algorithms.mismatch import drift_sums, means, mismatch_sums


def test_kl_takes_the_engine_as_the_truth():
    """pi = exp(-15), mu = exp(-5) for one sampled token: about 9, not the 22,000 of the other direction."""
    mask_T = torch.ones(1, dtype=torch.bool)
    sums = mismatch_sums(torch.tensor([-15.0]), torch.tensor([-5.0]), mask_T)
    assert sums["mismatch/kl"].item() == pytest.approx(math.exp(-10) - 1 + 10, rel=1e-5)
    other = mismatch_sums(torch.tensor([-5.0]), torch.tensor([-15.0]), mask_T)
    assert other["mismatch/kl"].item() == pytest.approx(math.exp(10) - 1 - 10, rel=1e-5)


def test_kl_is_unbiased_over_a_distribution():
    pi_V = torch.log_softmax(torch.tensor([0.1, 1.0, -0.5, 0.3]), 0)
    mu_V = torch.log_softmax(torch.tensor([0.0, 0.8, -0.2, 0.5]), 0)
    exact = (mu_V.double().exp() * (mu_V - pi_V).double()).sum().item()
    one = torch.ones(1, dtype=torch.bool)
    estimate = sum(mu_V[v].exp().item() * mismatch_sums(pi_V[v:v + 1], mu_V[v:v + 1], one)["mismatch/kl"].item()
                   for v in range(4))
    assert estimate == pytest.approx(exact, rel=1e-4)


AGES = [0, 0, 1, 1, 2, 3, 4, 9]
POSITIONS = [0, 1024, 1023, 4095, 4096, 16383, 16384, 50000]
PLACES = {"to_1k": [0, 2], "to_4k": [1, 3], "to_16k": [4, 5], "beyond": [6, 7]}


def _metrics(chosen: list[int]) -> tuple[dict[str, float], list[float]]:
    pi = [-1.0, -2.0, -0.5, -3.0, -1.5, -0.2, -0.1, -4.0]
    mu = [-1.1, -1.8, -1.5, -2.0, -1.7, -1.2, -0.9, -2.0]
    mask_T, ages_T = torch.zeros(8, dtype=torch.bool), torch.tensor(AGES)
    mask_T[chosen] = True
    sums = {"train/tokens": mask_T.sum()}
    sums |= mismatch_sums(torch.tensor(pi), torch.tensor(mu), mask_T & (ages_T == 0))
    sums |= drift_sums(torch.tensor(pi), torch.tensor(mu), ages_T, torch.tensor(POSITIONS), mask_T)
    return means({name: value.item() for name, value in sums.items()}), [p - m for p, m in zip(pi, mu, strict=True)]


def test_drift_is_told_by_age_and_position_and_never_as_mismatch():
    metrics, x = _metrics(list(range(8)))

    def expect(name: str, places: list[int]) -> None:
        assert metrics[f"{name.format('kl')}"] == pytest.approx(
            sum(math.expm1(x[i]) - x[i] for i in places) / len(places), rel=1e-5), name
        assert metrics[f"{name.format('abs_mean')}"] == pytest.approx(
            sum(abs(x[i]) for i in places) / len(places), rel=1e-5), name

    expect("mismatch/{}", [0, 1])
    expect("mismatch/{}/to_1k", [0])
    expect("mismatch/{}/to_4k", [1])
    expect("drift/{}", [2, 3, 4, 5, 6, 7])
    for age, places in {"age_1": [2, 3], "age_2": [4], "age_3": [5], "age_4_up": [6, 7]}.items():
        expect("drift/{}/" + age, places)
    for place, tokens in PLACES.items():
        expect("drift/{}/" + place, [i for i in tokens if i > 1])
    assert metrics["mismatch/abs_max"] == pytest.approx(0.2)
    assert metrics["drift/divergence"] == pytest.approx(sum(abs(math.expm1(each)) for each in x) / 8, rel=1e-5)
    assert not {"mismatch/kl/to_16k", "mismatch/kl/beyond", "drift/kl/age_0"} & metrics.keys()


def test_what_does_not_occur_is_absent_and_not_zero():
    stale, _ = _metrics([2, 4])
    assert not [name for name in stale if name.startswith("mismatch/")]
    assert {name for name in stale if name.startswith("drift/kl")} == {
        "drift/kl", "drift/kl/age_1", "drift/kl/age_2", "drift/kl/to_1k", "drift/kl/to_16k"}
    fresh, _ = _metrics([0, 1])
    assert {name for name in fresh if name.startswith("drift/")} == {"drift/divergence"}
    assert "mismatch/kl" in fresh
