"""A step's metrics from its parts."""

from __future__ import annotations

import numpy as np
import pytest

from launch.config.schema import Algorithm
from megatron_rl.algorithms.batch import batch_statistics
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.driver.step_metrics import of_step
from megatron_rl.monitor.metrics import lookup
from megatron_rl.rewards.sample import Score
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
    scores = [[Score(1.0, {"a": 1.0, "b": 0.0}), Score(0.0, {"a": 0.0, "b": 1.0}, "error")]]
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
        "throughput/rollout_tokens_per_s": 7 / 2, "reward/errors": 0.5, "reward/component/a": 0.5,
        "reward/component/b": 0.5, "weights/version": STEP, "sync/gb_per_s": 2.0, "sync/verify_seconds": 0.75,
        "train/tokens": 7, "train/ratio_max": 1.5, "train/lr": 0.1, "train/loss": 1.5, "mismatch/kl": 0.25,
        "drift/kl": 0.5}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
