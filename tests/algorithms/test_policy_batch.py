"""From scored groups to mini-batches."""

from __future__ import annotations

import numpy as np
import pytest

from launch.config.schema import Algorithm
from launch.errors import UserError
from megatron_rl.algorithms.advantages import group_advantages
from megatron_rl.algorithms.batch import NothingToLearn, batch_statistics, build_policy_batches
from megatron_rl.data.batch import Group, Prompt, Trajectory

LIMIT, VERSION = 6, 1


def algorithm(**changes) -> Algorithm:
    return Algorithm.model_validate({"group_size": 2, "prompts_per_step": 2, "advantage": "grpo_no_std", **changes})


def build(groups, rewards, config: Algorithm, version: int = VERSION):
    """The mini-batches and the statistics."""
    return build_policy_batches(groups, rewards, config, LIMIT, version), batch_statistics(groups, rewards, config)


def trajectory(tokens: list[int], finish_reason: str = "stop", tool: tuple[int, ...] = (),
               version: int = VERSION) -> Trajectory:
    """`tool`: the places that a tool wrote; there is no number at them that could be used."""
    ids, sampled = np.array(tokens, dtype=np.int32), np.ones(len(tokens), dtype=bool)
    sampled[list(tool)] = False
    logprobs = np.where(sampled, -0.1 * ids, np.nan).astype(np.float32)
    return Trajectory(ids, sampled, logprobs, np.where(sampled, version, 999).astype(np.int32), finish_reason)


def group(index: int, prompt: list[int], *trajectories: Trajectory) -> Group:
    return Group(Prompt(index, np.array(prompt, dtype=np.int32), "prompt", "1", {}), trajectories)


GROUPS = [group(4, [90, 91], trajectory([1, 2, 3]), trajectory([4])),
          group(9, [92], trajectory([5, 6], "length"), trajectory([7, 8, 9, 10, 11]), trajectory([12]))]
REWARDS = [np.array([1.0, 0.0]), np.array([2.0, 0.0, 1.0])]


def test_layout_of_one_batch():
    (batch,), statistics = build(GROUPS, REWARDS, algorithm())
    assert batch.tokens_N.tolist() == [90, 91, 1, 2, 3, 90, 91, 4, 92, 5, 6, 92, 7, 8, 9, 10, 11, 92, 12]
    assert batch.lengths_B.tolist() == [5, 3, 3, 6, 2] and batch.prompt_lengths_B.tolist() == [2, 2, 1, 1, 1]
    assert batch.offsets_B1[-1] == len(batch.tokens_N)
    assert batch.sampled_N.dtype == bool
    on_response = np.array([0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1], dtype=bool)
    np.testing.assert_array_equal(batch.sampled_N, on_response)
    np.testing.assert_array_equal(batch.loss_weights_N, on_response)
    assert batch.normaliser == 12
    np.testing.assert_allclose(batch.behaviour_logprobs_N, np.where(on_response, -0.1 * batch.tokens_N, 0), rtol=1e-6)
    np.testing.assert_allclose(
        batch.advantages_N, [0, 0, .5, .5, .5, 0, 0, -.5, 0, 1, 1, 0, -1, -1, -1, -1, -1, 0, 0], atol=1e-7)
    assert batch.ages_N.dtype == np.int32 and not batch.ages_N.any()
    for name in ("loss_weights_N", "advantages_N", "behaviour_logprobs_N"):
        assert getattr(batch, name).dtype == np.float32
    assert batch.extras["group_B"].tolist() == [0, 0, 1, 1, 1]
    assert statistics.truncated == 0.2 and statistics.masked == 0.0
    assert statistics.metrics()["reward/mean"] == pytest.approx(0.8)
    assert statistics.metrics()["response/length_mean"] == pytest.approx(12 / 5)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_truncated_answers_leave_the_loss_but_not_the_baseline(aggregation):
    config = algorithm(truncated="mask", aggregation=aggregation)
    (batch,), statistics = build(GROUPS, REWARDS, config)
    truncated = slice(8, 11)
    assert (batch.loss_weights_N[truncated] == 0).all()
    # The baseline of the second group is (2 + 0 + 1) / 3 = 1 with the truncated answer, 0.5 without it.
    assert batch.advantages_N[12] == pytest.approx(-1.0) and batch.advantages_N[-1] == pytest.approx(0.0)
    total = batch.loss_weights_N.astype(np.float64).sum() / batch.normaliser
    assert total == pytest.approx({"token_mean": 1, "sequence_mean": 1, "sequence_sum": 10 / 4,
                                   "constant": 10 / 4 / LIMIT}[aggregation], rel=1e-6)
    assert statistics.masked == 0.2


def test_everything_truncated_and_masked_gives_no_weight():
    groups = [group(0, [1], trajectory([1, 2], "length"), trajectory([3], "length"))]
    (batch,), statistics = build(groups, [np.array([1.0, 0.0])], algorithm(truncated="mask"))
    assert (batch.loss_weights_N == 0).all() and batch.normaliser == 0 and statistics.masked == 1.0


def test_mini_batches_are_whole_groups_each_with_its_own_normaliser():
    groups = GROUPS + [group(11, [93], trajectory([13]), trajectory([14, 15]))]
    rewards = [*REWARDS, np.array([1.0, 1.0])]
    batches, statistics = build(groups, rewards, algorithm(updates_per_batch=2))
    assert [batch.extras["group_B"].tolist() for batch in batches] == [[0, 0, 1, 1, 1], [2, 2]]
    assert [(batch.loss_weights_N.sum(), batch.normaliser) for batch in batches] == [(12, 12), (3, 3)]
    assert statistics.groups["group/zero_variance"] == pytest.approx(1 / 3)
    (whole,), _ = build(groups, rewards, algorithm())
    np.testing.assert_array_equal(np.concatenate([batch.advantages_N for batch in batches]), whole.advantages_N)
    np.testing.assert_array_equal(np.concatenate([batch.tokens_N for batch in batches]), whole.tokens_N)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo"])
def test_order_of_arrival_does_not_change_a_trajectories_advantage(kind):
    """Groups of unequal sizes that come back in any order, their trajectories too (NeMo-RL#1627, slime#1918): rewards
    lie beside their trajectories, and each trajectory keeps the advantage that its own group gives it."""
    rng = np.random.default_rng(0)
    sizes, token, groups, rewards, truth = [2, 5, 4, 1, 3], 0, [], [], {}
    for index, size in enumerate(sizes):
        rewards_G = rng.normal(size=size) * (index + 1) + 10 * index
        groups.append(group(index, [100 + index], *(trajectory([token + i]) for i in range(size))))
        rewards.append(rewards_G)
        (advantages_G,) = group_advantages([rewards_G], kind)
        truth |= {token + i: advantages_G[i] for i in range(size)}
        token += size
    for _ in range(5):
        order = rng.permutation(len(groups))
        inside = [rng.permutation(sizes[g]) for g in order]
        arrived = [Group(groups[g].prompt, tuple(groups[g].trajectories[i] for i in p))
                   for g, p in zip(order, inside, strict=True)]
        batches, _ = build(arrived, [rewards[g][p] for g, p in zip(order, inside, strict=True)],
                                        algorithm(advantage=kind, updates_per_batch=2))
        found = {int(token): value for batch in batches
                 for token, value in zip(batch.tokens_N, batch.advantages_N, strict=True) if token < 100}
        assert found == pytest.approx(truth, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("nothing", [trajectory([]), trajectory([50, 51], tool=(0, 1))], ids=["empty", "tools only"])
def test_a_trajectory_without_a_sampled_token_is_no_part_of_the_loss(nothing):
    groups = [group(0, [1, 2], nothing, trajectory([3, 4]))]
    (batch,), _ = build(groups, [np.array([0.0, 1.0])], algorithm(aggregation="sequence_mean"))
    assert batch.lengths_B.tolist() == [2 + len(nothing.token_ids), 4]
    np.testing.assert_allclose(batch.loss_weights_N, [*[0] * len(nothing.token_ids), 0, 0, 0, 0, .5, .5])
    assert batch.normaliser == 1


@pytest.mark.parametrize("advantage", ["grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize(("ended", "reward"), [("abort", 1e9), ("abort", np.nan), ("stop", np.nan), ("length", np.nan)])
def test_aborted_or_without_a_reward_it_is_in_neither_loss_nor_baseline(advantage, aggregation, ended, reward):
    """The batch is what it would be had such a trajectory never been asked for. NaN: the reward failed."""
    config = algorithm(advantage=advantage, aggregation=aggregation)
    more = group(9, [92], trajectory([5, 6], "length"), trajectory([40, 41, 42], ended),
                 trajectory([7, 8, 9, 10, 11]), trajectory([], ended), trajectory([12]))
    rewards = [REWARDS[0], np.array([2.0, reward, 0.0, reward, 1.0])]
    (batch,), statistics = build([GROUPS[0], more], rewards, config)
    (expected,), same = build(GROUPS, REWARDS, config)
    for name in ("tokens_N", "lengths_B", "prompt_lengths_B", "loss_weights_N", "advantages_N",
                 "behaviour_logprobs_N", "normaliser"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
    assert statistics == same and statistics.dropped == 0.0


@pytest.mark.parametrize(("end", "none"), [("abort", 0.0), ("stop", np.nan)], ids=["aborted", "failed"])
def test_a_group_in_which_fewer_than_two_count_is_dropped_and_counted(end, none):
    cut = group(3, [1], trajectory([1], end), trajectory([2]))
    lost = group(5, [1], trajectory([], end), trajectory([2], end))
    groups, rewards = [cut, *GROUPS, lost], [np.array([none, 1.0]), *REWARDS, np.array([none, none])]
    batches, statistics = build(groups, rewards, algorithm(updates_per_batch=4))
    assert [batch.extras["group_B"].tolist() for batch in batches] == [[1, 1], [2, 2, 2]], "places in the whole batch"
    assert statistics.dropped == 0.5 and statistics.metrics()["group/dropped"] == 0.5
    error, message = ((NothingToLearn, "engines aborted .* none of the 2 groups has two left") if end == "abort" else
                      (UserError, "reward of 3 of 4 trajectories failed, so that none of the 2 groups"))
    with pytest.raises(error, match=message):
        build([cut, lost], [rewards[0], rewards[-1]], algorithm())


@pytest.mark.parametrize("groups, rewards, changes, message", [
    (GROUPS, REWARDS[:1], {}, "groups"),
    (GROUPS, [REWARDS[0], np.array([1.0])], {}, "prompt 9: 3 trajectories but 1 rewards"),
    (GROUPS, REWARDS, {"updates_per_batch": 3}, "cannot be split into 3 updates"),
])
def test_what_does_not_fit_is_refused(groups, rewards, changes, message):
    with pytest.raises(ValueError, match=message):
        build(groups, rewards, algorithm(**changes))


TOOLS = [group(4, [90, 91], trajectory([1, 2, 50, 51, 3], tool=(2, 3)), trajectory([4])),
         group(9, [92], trajectory([52, 5, 6], "length", tool=(0,)), trajectory([7, 8, 53, 9, 54], tool=(2, 4)),
               trajectory([12]))]
"""Tokens from 50 to 59 were written by tools: first, between turns, last."""


def test_what_a_tool_wrote_is_context_and_nothing_else():
    (batch,), statistics = build(TOOLS, REWARDS, algorithm())
    assert batch.tokens_N.tolist() == [90, 91, 1, 2, 50, 51, 3, 90, 91, 4, 92, 52, 5, 6, 92, 7, 8, 53, 9, 54, 92, 12]
    assert batch.lengths_B.tolist() == [7, 3, 4, 6, 2]
    np.testing.assert_array_equal(batch.sampled_N, batch.tokens_N < 50)
    for values_N in (batch.loss_weights_N, batch.advantages_N, batch.behaviour_logprobs_N, batch.ages_N):
        assert (values_N[~batch.sampled_N] == 0).all()
    np.testing.assert_allclose(batch.behaviour_logprobs_N[batch.sampled_N], -0.1 * batch.tokens_N[batch.sampled_N],
                               rtol=1e-6)
    assert statistics.length_mean == pytest.approx((3 + 1 + 2 + 3 + 1) / 5) and statistics.length_max == 3


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_normalisers_count_what_was_sampled(aggregation, truncated):
    """The loss of the batch is the paper's formula over the sampled tokens alone, whatever a tool wrote."""
    config = algorithm(aggregation=aggregation, truncated=truncated)
    (batch,), _ = build(TOOLS, REWARDS, config)
    losses = {int(token): float(token) ** 2 for token in batch.tokens_N}
    sampled = [[1, 2, 3], [4], [5, 6], [7, 8, 9], [12]]
    kept = [[losses[token] for token in tokens] for tokens in sampled if truncated == "keep" or tokens != [5, 6]]
    sums = [sum(values) for values in kept]
    expected = {"token_mean": sum(sums) / sum(map(len, kept)), "sequence_sum": np.mean(sums),
                "sequence_mean": np.mean([np.mean(values) for values in kept]),
                "constant": np.mean(sums) / LIMIT}[aggregation]
    found = sum(weight * losses[int(token)]
                for weight, token in zip(batch.loss_weights_N, batch.tokens_N, strict=True))
    assert found / batch.normaliser == pytest.approx(expected, rel=1e-6)


def test_arrays_of_different_lengths_are_no_trajectory():
    ids = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match="a trajectory of 3 tokens with 3 sampled, 2 logprobs, 3 weight_versions"):
        Trajectory.one_turn(ids, np.zeros(2, np.float32), ids, "stop")


def test_ages_count_from_the_trainers_version():
    old = Trajectory(np.arange(4, dtype=np.int32), np.array([True, True, False, True]), np.zeros(4, np.float32),
                     np.array([5, 6, 999, 8], dtype=np.int32), "stop")
    groups = [group(0, [90], old, trajectory([1], version=8))]
    (batch,), _ = build(groups, [np.array([1.0, 0.0])], algorithm(), version=8)
    assert batch.ages_N.tolist() == [0, 3, 2, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="sampled by version 8, and the trainer has version 7"):
        build(groups, [np.array([1.0, 0.0])], algorithm(), version=7)


@pytest.mark.parametrize("truncated", ["keep", "mask"])
@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_sees_all_mini_batches_and_what_is_in_the_loss(advantage, truncated):
    config = algorithm(advantage=advantage, updates_per_batch=2, truncated=truncated)
    batches, _ = build(TOOLS, REWARDS, config)
    assert len(batches) == 2
    in_loss_N = np.concatenate([batch.loss_weights_N for batch in batches]) != 0
    advantages_N = np.concatenate([batch.advantages_N for batch in batches])[in_loss_N].astype(np.float64)
    assert len(advantages_N) == (10 if truncated == "keep" else 8)
    assert advantages_N.mean() == pytest.approx(0, abs=1e-6) and advantages_N.std(ddof=1) == pytest.approx(1, rel=1e-6)
    assert abs(batches[0].advantages_N[batches[0].sampled_N].mean()) > 0.05, "not one mini-batch alone"
    assert advantages_N[0] > 0, "the first trajectory is above the mean"
