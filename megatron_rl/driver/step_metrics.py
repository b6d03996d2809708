"""Computes the metrics of a step from its parts, named as in `megatron_rl.monitor.metrics`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from launch.config.resolved import ResolvedConfig
from megatron_rl.algorithms.batch import BatchStatistics
from megatron_rl.data.batch import Group, Trajectory
from megatron_rl.rewards.sample import Score, group_rewards
from megatron_rl.weight_sync.protocol import SyncReport

COUNTS = ("train/tokens", "train/sequences", "train/microbatches", "train/skipped")
"""Metrics summed over a step's updates. Maxima stay maxima. All others are averaged over the updates that have them."""


def of_step(step: int, groups: Sequence[Group], scores: Sequence[Sequence[Score]], statistics: BatchStatistics,
            updates: Sequence[Mapping[str, float]], sync: SyncReport, times: Mapping[str, float]) -> dict[str, float]:
    """All metrics that are logged for a step."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    flat = [score for group in scores for score in group]
    ages = step - 1 - np.concatenate([each.weight_versions[each.sampled] for each in trajectories])
    transfer = sync.seconds["transfer"]
    return {
        **statistics.metrics(), **_components(trajectories, flat), **_updates(updates), **times,
        **_rates(groups, times),
        "time/reward_sample": float(np.mean([score.seconds for score in flat])),
        "reward/errors": sum(score.reward_failed for score in flat) / len(flat),
        "reward/timeouts": sum(score.status == "timeout" for score in flat) / len(flat),
        "response/aborted": sum(each.finish_reason == "abort" for each in trajectories) / len(trajectories),
        "response/length_min": float(min(each.length for each in trajectories)),
        "prompt/length_mean": float(np.mean([len(group.prompt.token_ids) for group in groups])),
        "staleness/mean": float(ages.mean()), "staleness/max": float(ages.max()),
        "weights/version": float(sync.version),
        **{f"engines/groups/{engine}": float(count)
           for engine, count in sorted(Counter(group.engine for group in groups).items())},
        "sync/bytes": float(sync.nbytes), "sync/seconds": transfer, "sync/pause_seconds": sync.seconds["pause"],
        "sync/verify_seconds": sync.seconds["verify"] + max(sync.seconds.get("digest", 0.0),
                                                            sync.seconds.get("live_digest", 0.0)),
        "sync/gb_per_s": sync.nbytes / 1e9 / max(transfer, 1e-9),
    }


def divergence(updates: Sequence[Mapping[str, float]]) -> float | None:
    """`drift/divergence` of a step; None without a token in the loss."""
    return _updates(updates).get("drift/divergence")


def _rates(groups: Sequence[Group], times: Mapping[str, float]) -> dict[str, float]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tokens = (sum(len(each.token_ids) for each in trajectories)
              + sum(len(group.prompt.token_ids) * len(group.trajectories) for group in groups))
    return {"throughput/samples_per_s": len(trajectories) / times["time/step"],
            "throughput/tokens_per_s": tokens / times["time/step"],
            "throughput/rollout_tokens_per_s": sum(each.length for each in trajectories)
            / max(times["time/rollout"] + times["time/rollout_hidden"], 1e-9)}


def of_evaluation(file: Path, groups: Sequence[Group], scores: Sequence[Sequence[Score]],
                  config: ResolvedConfig) -> dict[str, float]:
    """Compute the metrics of greedy answers, one per question, and write each answer to `file` (JSONL), so that two
    evaluations can be compared by question. The reward function `eval.right` decides which answers are right. An answer
    that it did not grade, or that an engine aborted, is neither right nor wrong. Without any grade there is no
    `eval/accuracy`, and without any reward no `eval/reward`."""
    decides = config.eval.right or config.reward.functions[0].function
    rows = [(group.prompt, group.trajectories[0], score[0]) for group, score in zip(groups, scores, strict=True)]
    right = [score.components[decides] >= 1
             if decides in score.components and trajectory.finish_reason != "abort" else None
             for _, trajectory, score in rows]
    rewards = np.concatenate([group_rewards(*each) for each in zip(groups, scores, strict=True)])
    with file.open("w", encoding="utf-8") as out:
        for (prompt, trajectory, score), is_right, reward in zip(rows, right, rewards, strict=True):
            out.write(json.dumps({"index": int(prompt.row), "prompt": prompt.text, "answer": prompt.answer,
                                  "completion": trajectory.text, "finish_reason": trajectory.finish_reason,
                                  "reward": None if np.isnan(reward) else float(reward), "components": score.components,
                                  "right": is_right}, ensure_ascii=False) + "\n")
    lengths = [trajectory.length for _, trajectory, _ in rows]
    graded = [each for each in right if each is not None]
    return {**({"eval/accuracy": float(np.mean(graded))} if graded else {}),
            **({"eval/reward": float(np.nanmean(rewards))} if not np.isnan(rewards).all() else {}),
            "eval/ungraded": 1.0 - len(graded) / len(rows),
            "eval/questions": float(len(rows)), "eval/length_mean": float(np.mean(lengths)),
            "eval/truncated": float(np.mean([trajectory.finish_reason == "length" for _, trajectory, _ in rows]))}


def _components(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> dict[str, float]:
    counted = [score.components for trajectory, score in zip(trajectories, scores, strict=True)
               if score.graded and trajectory.finish_reason != "abort"]
    names = {name for components in counted for name in components}
    if len(names) < 2:
        return {}
    return {f"reward/component/{name}": float(np.mean([components[name] for components in counted]))
            for name in sorted(names)}


def _updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    merged = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        merged[name] = (sum(values) if name in COUNTS else max(values) if name.endswith("_max")
                        else values[-1] if name == "train/lr" else sum(values) / len(values))
    return merged
