from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.planner.workload import lengths_file
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.monitor.samples import RolloutWriter, SampleWriter, pick
from megatron_rl.rewards.sample import Score


def test_the_one_success_of_a_batch_is_shown():
    rewards_PG = np.zeros((16, 8))
    rewards_PG[11, 3] = 1.0
    assert (11, 3, "outlier_high") in pick(rewards_PG)


def test_an_outlier_below_is_shown_and_ordinary_spread_is_not_called_one():
    rewards_PG = np.linspace(0, 1, 32).reshape(4, 8)
    assert not [why for _, _, why in pick(rewards_PG) if why.startswith("outlier")]
    rewards_PG[2, 5] = -50
    assert (2, 5, "outlier_low") in pick(rewards_PG)


def test_what_has_no_reward_is_not_shown():
    rewards = [np.array([np.nan, 0.0, 1.0]), np.array([np.nan, np.nan]), np.array([7.0, np.nan])]
    assert {(p, g) for p, g, _ in pick(rewards)} == {(0, 1), (0, 2), (2, 0)}
    assert pick(rewards[1:2]) == []


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_choice_is_small_unique_and_repeats(prompts, group_size, seed):
    """Groups of unequal sizes: the p-th lacks its last p % 2 samples."""
    random = np.random.default_rng(seed)
    rewards = [random.choice([0.0, 1.0, 7.0], size=group_size - p % 2, p=[0.6, 0.35, 0.05]) for p in range(prompts)]
    chosen = pick(rewards)
    assert chosen == pick([group.copy() for group in rewards])
    places = [(p, g) for p, g, _ in chosen]
    assert 1 <= len(places) == len(set(places)) <= 10
    shown = [rewards[p][g] for p, g in places]
    assert max(shown) == max(map(max, rewards)) and min(shown) == min(map(min, rewards))


def test_record_belongs_to_its_trajectory(tmp_path):
    groups = [make_group(row, ["a", "b", "c"]) for row in (40, 41)]
    rewards_PG = np.array([[0, 0.25, 0.5], [1, 2, 3]], float)
    writer = SampleWriter(tmp_path / "samples.jsonl", every=5)
    for step in range(1, 8):
        writer.write(step, groups, rewards_PG)
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {r["step"] for r in records} == {1, 5}
    for r in records:
        assert r["completion"] == f"{'abc'[r['sample']]} to {r['row']}"
        assert r["reward"] == rewards_PG[r["row"] - 40, r["sample"]]


def test_rewards_of_another_shape_are_refused(tmp_path):
    with pytest.raises(ValueError, match="shape"):
        SampleWriter(tmp_path / "s.jsonl", every=1).write(1, [make_group(0, ["a", "b"])], np.zeros((2, 1)))


def test_a_rollout_batch_is_written_whole_and_exactly(tmp_path):
    """Also what a tool wrote in a trajectory, whose entries in the log-probs are no numbers."""
    random = np.random.default_rng(0)
    groups, scores = [], []
    for row in (7, 3):
        sampled = np.array([True, False, True])
        trajectories = [Trajectory(random.integers(0, 9, 3, dtype=np.int32), sampled,
                                   np.where(sampled, -random.random(3), np.nan).astype(np.float32),
                                   np.array([4, 999, 5], np.int32), "stop", f"é{row}") for _ in range(2)]
        groups.append(Group(Prompt(row, np.array([1, 2], np.int32), f"question {row}", "answer", {}),
                            tuple(trajectories), engine=1))
        scores.append([Score(0.1 * row, {"f": 0.1}), Score.failed("timeout", "")])
    writer = RolloutWriter(tmp_path / "rollouts", every=2)
    assert [step for step in range(1, 7) if writer.due(step)] == [2, 4, 6]
    assert not RolloutWriter(tmp_path, every=0).due(2)
    writer.write(4, groups, scores)
    (path,) = (tmp_path / "rollouts").iterdir()
    assert path.name == "step-000004.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(each["group"], each["row"], each["sample"]) for each in records] == [
        (0, 7, 0), (0, 7, 1), (1, 3, 0), (1, 3, 1)]
    for record in records:
        trajectory = groups[record["group"]].trajectories[record["sample"]]
        assert record["step"] == 4 and record["engine"] == 1 and record["completion"] == f"é{record['row']}"
        assert record["prompt_token_ids"] == [1, 2] and record["token_ids"] == trajectory.token_ids.tolist()
        assert record["logprobs"][1] is None and record["weight_versions"] == [4, None, 5]
        read_back = np.array([record["logprobs"][0], record["logprobs"][2]], np.float32)
        assert read_back.tobytes() == trajectory.logprobs[trajectory.sampled].tobytes()
    assert [(each["reward"], each["status"]) for each in records] == [
        (0.7000000000000001, "ok"), (None, "timeout"), (0.30000000000000004, "ok"), (None, "timeout")]
    assert lengths_file.read(path) == {2: 4}, "the planner reads the lengths"


def make_group(row: int, texts: list[str]) -> Group:
    prompt = Prompt(row, np.array([1], np.int32), f"question {row}", "answer", {})
    return Group(prompt, tuple(Trajectory.one_turn(np.array([1, 2], np.int32), np.zeros(2, np.float32),
                                                   np.zeros(2, np.int32), "stop", f"{text} to {row}")
                               for text in texts))
