"""A step's metrics from its parts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from launch.config.schema import Algorithm
from launch.planner.prepare import prepare
from megatron_rl.algorithms.batch import batch_statistics
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.driver.step_metrics import of_evaluation, of_step
from megatron_rl.monitor.metrics import lookup
from megatron_rl.rewards.sample import Score
from megatron_rl.rollout.pending import ScoredGroups
from megatron_rl.weight_sync.protocol import SyncReport

STEP = 8
SYNC = SyncReport(STEP, STEP, 4_000_000_000, {"transfer": 2.0, "pause": 0.5, "verify": 0.25, "digest": 0.5})
TIMES = {"time/step": 4.0, "time/rollout": 1.5, "time/rollout_hidden": 0.5}


def _trajectory(sampled: list[int], versions: list[int], reason: str = "stop") -> Trajectory:
    ids = np.arange(len(sampled), dtype=np.int32)
    return Trajectory(ids, np.array(sampled, dtype=bool), np.zeros(len(ids), np.float32),
                      np.array(versions, dtype=np.int32), reason)


def test_what_tools_wrote_counts_as_work_and_not_as_the_policys() -> None:
    """Seven tokens were sampled, of which two by the version before; four were written by tools."""
    prompt = Prompt(0, np.arange(5, dtype=np.int32), "", None, {})
    groups = [Group(prompt, (_trajectory([1, 1, 0, 0, 0, 1], [6, 6, 0, 0, 0, 7]),
                             _trajectory([1, 0, 1, 1, 1], [7, -1, 7, 7, 7], "length")))]
    scores = [[Score(1.0, {"a": 1.0, "b": 0.0}), Score(0.0, {"a": 0.0, "b": 1.0}, seconds=0.5)]]
    algorithm = Algorithm.model_validate({"group_size": 2, "prompts_per_step": 1})
    statistics = batch_statistics(groups, [np.array([1.0, 0.0])], algorithm)
    updates = [{"train/tokens": 5.0, "train/ratio_max": 1.5, "train/lr": 0.2, "train/loss": 1.0, "mismatch/kl": 0.25},
               {"train/tokens": 2.0, "train/ratio_max": 1.25, "train/lr": 0.1, "train/loss": 2.0, "drift/kl": 0.5}]
    metrics = of_step(STEP, groups, scores, statistics, updates, SYNC, TIMES)
    assert all(lookup(name) for name in metrics)
    expected = {
        "staleness/mean": 2 / 7, "staleness/max": 1, "response/length_mean": 3.5, "response/length_max": 4,
        "response/length_min": 3, "response/truncated": 0.5, "response/aborted": 0, "prompt/length_mean": 5,
        "throughput/samples_per_s": 2 / 4, "throughput/tokens_per_s": (7 + 4 + 2 * 5) / 4,
        "throughput/rollout_tokens_per_s": 7 / 2, "reward/errors": 0.0, "time/reward_sample": 0.25,
        "reward/component/a": 0.5, "reward/component/b": 0.5, "weights/version": STEP,
        "sync/gb_per_s": 2.0, "sync/verify_seconds": 0.75,
        "train/tokens": 7, "train/ratio_max": 1.5, "train/lr": 0.1, "train/loss": 1.5, "mismatch/kl": 0.25,
        "drift/kl": 0.5}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_a_failed_reward_is_counted_and_in_no_mean() -> None:
    """Six trajectories: two rewards failed, an aborted one was graded all the same. Three rewards are left: 1, 0, 1."""
    prompt = Prompt(0, np.arange(5, dtype=np.int32), "", None, {})
    lengths = iter(range(1, 7))

    def made(reason: str) -> Trajectory:
        return _trajectory([1] * (count := next(lengths)), [7] * count, reason)

    groups = [Group(prompt, (made("stop"), made("stop"), made("abort"))),
              Group(prompt, (made("stop"), made("stop"), made("length")))]
    scores = [[Score(1.0, {"a": 1.0, "b": 0.0}), Score.failed("timeout", "", "b", {"a": 1.0}),
               Score(5.0, {"a": 5.0, "b": 0.0})],
              [Score(0.0, {"a": 0.0, "b": 0.0}), Score.failed("error", ""), Score(1.0, {"a": 0.5, "b": 0.5})]]
    algorithm = Algorithm.model_validate({"group_size": 3, "prompts_per_step": 2})
    statistics = batch_statistics(groups, ScoredGroups(groups, scores).rewards, algorithm)
    metrics = of_step(STEP, groups, scores, statistics, [{}], SYNC, TIMES)
    expected = {"reward/errors": 2 / 6, "reward/timeouts": 1 / 6, "response/aborted": 1 / 6, "group/dropped": 1 / 2,
                "reward/mean": 1 / 2, "reward/component/a": (1 + 0 + 0.5) / 3, "reward/component/b": 0.5 / 3}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_an_evaluation_counts_what_is_neither_right_nor_wrong(tmp_path) -> None:
    """The second function failed after the first, which decides, had graded the answer."""
    config = prepare("configs/tiny/grpo.yaml", (), "cpu").config
    right, other = "exact_match", "exact_match#2"
    scores = [Score(1.0, {right: 1.0, other: 1.0}), Score(0.0, {right: 0.0, other: 0.0}), Score.failed("timeout", ""),
              Score.failed("error", "", other, {right: 1.0}), Score(0.0, {right: 0.0, other: 0.0})]
    reasons = ["stop", "stop", "stop", "length", "abort"]
    groups = [Group(Prompt(row, np.arange(5, dtype=np.int32), "", "1", {}), (_trajectory([1], [7], reason),))
              for row, reason in enumerate(reasons)]
    metrics = of_evaluation(tmp_path / "eval.jsonl", groups, [[score] for score in scores], config)
    assert all(lookup(name) for name in metrics)
    assert metrics == pytest.approx({"eval/accuracy": 2 / 3, "eval/reward": 1 / 2, "eval/ungraded": 2 / 5,
                                     "eval/questions": 5, "eval/length_mean": 1, "eval/truncated": 1 / 5})
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(row["right"], row["reward"]) for row in rows] == [
        (True, 1.0), (False, 0.0), (None, None), (True, None), (None, None)]
    nothing = of_evaluation(tmp_path / "none.jsonl", groups[2:3], [[scores[2]]], config)
    assert nothing["eval/ungraded"] == 1 and not {"eval/accuracy", "eval/reward"} & nothing.keys()
