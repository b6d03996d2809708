"""Advantages against closed forms written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.advantages import STD_EPSILON, group_advantages, group_metrics, whitened_advantages

KINDS = ("grpo", "grpo_no_std", "rloo")


def test_closed_forms_of_one_right_answer_in_four():
    rewards = [np.array([1.0, 0.0, 0.0, 0.0])]
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, leave-one-out baselines 0 and 1/3
    np.testing.assert_allclose(group_advantages(rewards, "grpo")[0],
                               np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "grpo_no_std")[0], [0.75, -0.25, -0.25, -0.25], rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "rloo")[0], [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


def test_uneven_groups_do_not_fall_into_one():
    """Rewards 1, 3 and 5 with 2, 3 and 4 samples (slime#1918): equal inside each group, so all advantages are 0;
    normalised over one global group they would not be."""
    rewards = [np.full(2, 1.0), np.full(3, 3.0), np.full(4, 5.0)]
    for kind in KINDS:
        advantages = group_advantages(rewards, kind)
        assert [len(advantages_G) for advantages_G in advantages] == [2, 3, 4]
        assert all((advantages_G == 0.0).all() for advantages_G in advantages)


def test_uneven_groups_with_spread_are_centred_each_on_its_own():
    rewards = [np.array([1.0, 2.0]), np.array([3.0, 3.0, 6.0]), np.array([5.0])]
    np.testing.assert_allclose(np.concatenate(group_advantages(rewards, "grpo_no_std")),
                               [-0.5, 0.5, -1.0, -1.0, 2.0, 0.0])
    np.testing.assert_allclose(np.concatenate(group_advantages(rewards, "rloo")),
                               [-1.0, 1.0, -1.5, -1.5, 3.0, 0.0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards_G", [[1.0, 1.0], [0.0, 0.0, 0.0], [0.7], [1e6, 1e6], [0.1 + 0.2, 0.3, 0.3]])
def test_no_spread_gives_exactly_zero(kind, rewards_G):
    assert (group_advantages([np.array(rewards_G)], kind)[0] == 0.0).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9), st.floats(0.1, 50), st.floats(-50, 50))
def test_properties(rewards_G, scale, shift):
    rewards_G = np.array(rewards_G)
    for kind in KINDS:
        advantages_G = group_advantages([rewards_G], kind)[0].astype(np.float64)
        assert abs(advantages_G.sum()) <= 1e-5 * max(1.0, np.abs(advantages_G).sum())
        shifted_G = group_advantages([rewards_G + shift], kind)[0]
        np.testing.assert_allclose(shifted_G, advantages_G, rtol=1e-4, atol=1e-4)
    if rewards_G.std(ddof=1) > 1e-2:
        scaled_G = group_advantages([rewards_G * scale], "grpo")[0]
        np.testing.assert_allclose(scaled_G, group_advantages([rewards_G], "grpo")[0], rtol=2e-3)
        assert STD_EPSILON == 1e-6


def test_metrics_of_groups():
    rewards = [np.array([1.0, 1.0]), np.array([0.0, 0.0]), np.array([0.0, 1.0]), np.array([0.5, 0.5])]
    assert group_metrics(rewards) == pytest.approx({
        "group/zero_variance": 0.75, "group/all_right": 0.25, "group/all_wrong": 0.25,
        "group/reward_std": np.sqrt(0.5) / 4})


@pytest.mark.parametrize("bad", [np.array([np.nan, 1.0]), np.array([np.inf, 1.0]), np.array([]), np.ones((2, 2))])
def test_rewards_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError):
        group_advantages([bad], "grpo")


WHITENED = [np.array([1.0, 0.0, 0.25]), np.array([0.0, 0.0]), np.array([1.0])]
TOKENS = [np.array([3, 10, 1]), np.array([4, 2]), np.array([0])]


@pytest.mark.parametrize("baseline", [False, True])
def test_whitening_is_over_the_tokens_of_all_groups(baseline):
    """As if the list of all tokens' returns were written out; the last trajectory has no token in the loss."""
    values = [rewards_G - rewards_G.mean() if baseline else rewards_G for rewards_G in WHITENED]
    written_out = np.repeat(np.concatenate(values), np.concatenate(TOKENS))
    assert len(written_out) == 20
    found = whitened_advantages(WHITENED, TOKENS, baseline=baseline)
    for values_G, found_G in zip(values, found, strict=True):
        np.testing.assert_allclose(found_G, (values_G - written_out.mean()) / written_out.std(ddof=1), rtol=1e-6)
    tokens_N = np.repeat(np.concatenate(found), np.concatenate(TOKENS)).astype(np.float64)
    assert tokens_N.mean() == pytest.approx(0, abs=1e-7) and tokens_N.std(ddof=1) == pytest.approx(1, rel=1e-6)
    assert all(found_G.dtype == np.float32 for found_G in found)


@pytest.mark.parametrize("rewards, tokens", [
    ([np.array([1.0, 1.0]), np.array([1.0])], [np.array([3, 4]), np.array([5])]),
    ([np.array([1.0, 0.0])], [np.array([0, 0])]),
    ([np.array([1.0, 0.0])], [np.array([5, 0])]),
])
def test_a_batch_of_one_value_has_no_whitened_advantage(rewards, tokens):
    for found_G in whitened_advantages(rewards, tokens, baseline=False):
        assert (found_G == 0).all()
