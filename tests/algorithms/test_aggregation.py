"""Loss weights: what they sum to, and that no split of the batch changes the loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.aggregation import loss_weights

KINDS = ("token_mean", "sequence_mean", "sequence_sum", "constant")
LENGTHS_B = np.array([3, 500, 1, 40])
KEPT_B = np.array([True, True, False, True])
LIMIT = 512


def token_losses(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=length) + np.sqrt(length) for length in LENGTHS_B]


def textbook(kind: str) -> float:
    """The loss as the papers write it, in float64, over the kept sequences."""
    losses = [losses_T for losses_T, kept in zip(token_losses(), KEPT_B, strict=True) if kept]
    if kind == "token_mean":
        return float(np.concatenate(losses).mean())
    if kind == "sequence_mean":
        return float(np.mean([losses_T.mean() for losses_T in losses]))
    sums = [losses_T.sum() for losses_T in losses]
    return float(np.mean(sums)) / (LIMIT if kind == "constant" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_sum_is_the_textbook_formula(kind):
    weights_B, normaliser = loss_weights(LENGTHS_B, KEPT_B, kind, LIMIT)
    assert weights_B.dtype == np.float32
    loss = sum(weight * losses_T.sum() for weight, losses_T in zip(weights_B, token_losses(), strict=True))
    assert loss / normaliser == pytest.approx(textbook(kind), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_normalisers_of_parts_add_up_to_the_batch(kind):
    """What `algorithm.overlap` rests on: no part knows the others."""
    for cut in range(len(LENGTHS_B) + 1):
        loss = total = 0.0
        for part in (slice(0, cut), slice(cut, None)):
            weights_B, normaliser = loss_weights(LENGTHS_B[part], KEPT_B[part], kind, LIMIT)
            loss += sum(weight * losses_T.sum() for weight, losses_T
                        in zip(weights_B, token_losses()[part], strict=True))
            total += normaliser
        assert loss / total == pytest.approx(textbook(kind), rel=1e-5)


def test_short_answers_do_not_weigh_more_in_another_micro_batch():
    """A mean per micro-batch, then a mean of means, differs from the token mean (open-instruct#1161); the weights,
    computed before the split, do not."""
    weights_B, normaliser = loss_weights(LENGTHS_B, np.ones(4, dtype=bool), "token_mean", LIMIT)
    losses = token_losses()
    for split in ([[0], [1, 2, 3]], [[0, 2], [1, 3]], [[3], [2], [1], [0]]):
        parts = [sum(weights_B[b] * losses[b].sum() for b in micro) for micro in split]
        assert sum(parts) / normaliser == pytest.approx(np.concatenate(losses).mean(), rel=1e-5)
        assert sum(weights_B[b] * LENGTHS_B[b] for micro in split for b in micro) == pytest.approx(normaliser)
    mean_of_means = np.mean([np.concatenate([losses[b] for b in micro]).mean() for micro in ([0, 2], [1, 3])])
    assert abs(mean_of_means - np.concatenate(losses).mean()) > 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_masked_and_empty_sequences_count_in_neither_sum(kind):
    with_them_B, with_them = loss_weights(np.array([5, 900, 7, 0]), np.array([True, False, True, True]), kind, LIMIT)
    without_B, without = loss_weights(np.array([5, 7]), np.array([True, True]), kind, LIMIT)
    assert with_them == without
    np.testing.assert_array_equal(with_them_B[[0, 2]], without_B)
    np.testing.assert_array_equal(with_them_B[[1, 3]], 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_masked_is_zero_and_not_nan(kind):
    weights_B, normaliser = loss_weights(LENGTHS_B, np.zeros(4, dtype=bool), kind, LIMIT)
    assert not weights_B.any() and normaliser == 0
    assert loss_weights(np.array([], dtype=int), np.array([], dtype=bool), kind, LIMIT)[0].shape == (0,)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=12))
def test_means_have_total_weight_one(rows):
    lengths_B, kept_B = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    expected = 1.0 if (kept_B & (lengths_B > 0)).any() else 0.0
    for kind in ("token_mean", "sequence_mean"):
        weights_B, normaliser = loss_weights(lengths_B, kept_B, kind, LIMIT)
        total = (weights_B.astype(np.float64) * lengths_B).sum()
        assert total / (normaliser or 1) == pytest.approx(expected, rel=1e-5)
