"""Which groups dynamic sampling replaces, for which reason, and what the end of a run says that has none left."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.rewards.sample import Score
from megatron_rl.rollout import refill


def group(row: int, rewards: list[float], *, failed: int = 0, aborted: int = 0, text: str = "text") -> refill.Replaced:
    """A group with these rewards. The first `failed` rewards failed; the last `aborted` trajectories were cut off."""
    reasons = ["stop"] * (len(rewards) - aborted) + ["abort"] * aborted
    none = np.zeros(0, np.int32)
    prompt = Prompt(row, np.zeros(1, np.int32), "", str(row), {})
    return (Group(prompt, tuple(Trajectory.one_turn(none, none.astype(np.float32), none, reason, text)
                                for reason in reasons)),
            [Score.failed("error", "ValueError: nan", "math") if i < failed else Score(reward)
             for i, reward in enumerate(rewards)])


@pytest.mark.parametrize(("made", "spread", "reason"), [
    (group(0, [1, 0, 1]), True, None),
    (group(0, [1, 1, 1]), False, "right"),
    (group(0, [2.5, 2.5]), False, "right"),
    (group(0, [0, 0, 0]), False, "wrong"),
    (group(0, [-1, -1]), False, "wrong"),
    (group(0, [0.3, 0.3]), False, "other"),
    (group(0, [0.1 + 0.2, 0.3]), False, "other"),       # equal but for the rounding of a weighted sum
    (group(0, [9, 0, 0], failed=1), False, "wrong"),    # it might have been right, or wrong as the others
    (group(0, [9, 1, 1], failed=1), False, "right"),
    (group(0, [9, 1, 0], failed=1), True, None),
    (group(0, [9, 9, 0], failed=2), False, "other"),
    (group(0, [1, 1, 0], aborted=1), False, "right"),   # the advantage does not see the one that was cut off
    (group(0, [1, 0], aborted=1), False, "other")])
def test_a_group_is_replaced_if_the_advantage_sees_no_difference(made, spread, reason):
    assert refill.has_spread(*made) is spread
    if not spread:
        assert refill.reason(*made) == reason


def test_replaced_groups_are_counted_by_reason():
    replaced = [group(0, [1, 1]), group(1, [0, 0]), group(2, [0, 0]), group(3, [.5, .5])]
    assert refill.metrics(replaced, trained=8) == {
        "group/replaced_right": 1.0, "group/replaced_wrong": 2.0, "group/replaced_other": 1.0,
        "group/generated_per_trained": 1.5}


EASY, HARD = [group(row, [1.0, 1.0], text="7") for row in range(9)], [group(row, [0, 0]) for row in range(20, 28)]


@pytest.mark.parametrize(("flat", "verdict", "counts", "shown", "fix"), [
    ([*EASY, *HARD], "the prompts are too easy", (9, 8, 0), "row 0, answer '0': '7': reward 1\n", "harder prompts"),
    ([*EASY[:3], *HARD], "the prompts are too hard", (3, 8, 0), "row 20, answer '20': 'text': reward 0\n",
     "easier prompts"),
    ([*HARD[:2], *(group(row, [.37, .37], text="y" * 300) for row in range(8))], "the reward is broken", (0, 2, 8),
     f"row 0, answer '0': '{'y' * 100}...': reward 0.37\n", "correct reward.functions"),
    ([group(row, [0, 0], failed=2) for row in range(8)], "the reward is broken", (0, 0, 8),
     "row 0, answer '0': 'text': math failed: ValueError: nan\n", "correct reward.functions")])
def test_the_end_tells_easy_hard_and_broken_apart_with_five_samples(flat, verdict, counts, shown, fix):
    error = refill.CannotBeFilled.of(12, flat, wanted=8, generated=len(flat) + 1)
    first, *samples = error.what.splitlines()
    refills = (len(flat) + 1) // 8 - 1
    assert first == (f"step 12: dynamic sampling generated {len(flat) + 1} groups, and 1 of them have different "
                     f"rewards, where the batch needs 8 (algorithm.dynamic_sampling.max_refill = {refills}): "
                     f"{verdict}. All right: {counts[0]}, all wrong: {counts[1]}, neither: {counts[2]}")
    assert len(samples) == 5 and samples[0].strip() + "\n" == shown
    assert all(re.match(r"  row \d+, answer '\d+': ", line) for line in samples)
    assert fix in error.fix
