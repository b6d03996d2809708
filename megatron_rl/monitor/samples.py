"""Trajectories in files. For people, a few every N steps and those with outlying rewards (samples.jsonl). For programs,
whole rollout batches as they were trained (rollouts/step-000001.jsonl)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_rl.data.batch import Group
from megatron_rl.rewards.sample import Score

SHOWN = 4
"""Number of ordinary trajectories per record."""
OUTLIERS = 2
"""Number of outliers per side and record."""


def pick(rewards: Sequence[np.ndarray]) -> list[tuple[int, int, str]]:
    """Choose trajectories to show, as (group, sample, why). `rewards[p][g]` is a total reward, or NaN if there is none;
    those are not chosen. Groups vary in size.

    It chooses `best` and `worst` of the batch, `sample` spread evenly over the prompts, and `outlier_high` /
    `outlier_low` outside Tukey's far fences (three interquartile ranges beyond the quartiles). Nothing appears twice,
    and equal rewards give equal choices.
    """
    places = [(p, g) for p, group in enumerate(rewards) for g in range(len(group)) if not np.isnan(group[g])]
    flat_B = np.concatenate(rewards)
    flat_B = flat_B[~np.isnan(flat_B)]
    if not flat_B.size:
        return []
    low, high = np.quantile(flat_B, [0.25, 0.75])
    fence = 3 * (high - low)
    order = np.argsort(flat_B, kind="stable")
    above = [int(b) for b in order[::-1][:OUTLIERS] if flat_B[b] > high + fence]
    below = [int(b) for b in order[:OUTLIERS] if flat_B[b] < low - fence]
    spread = np.linspace(0, flat_B.size - 1, num=min(SHOWN, flat_B.size)).round().astype(int)
    reasons: dict[int, str] = {}
    for why, chosen in (("outlier_high", above), ("outlier_low", below), ("best", [int(order[-1])]),
                        ("worst", [int(order[0])]), ("sample", [int(b) for b in spread])):
        for b in chosen:
            reasons.setdefault(b, why)
    return [(*places[b], why) for b, why in sorted(reasons.items())]


class SampleWriter:
    """Appends the choice of `pick` to `path` every `every` steps (0: never), one JSON object per trajectory."""

    def __init__(self, path: Path, every: int) -> None:
        self._path, self._every = path, every

    def due(self, step: int) -> bool:
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def write(self, step: int, groups: Sequence[Group], rewards: Sequence[np.ndarray]) -> None:
        """Write a record if it is due. `rewards[p][g]` is the total reward of `groups[p].trajectories[g]`.

        Raises ValueError if rewards and groups differ in shape."""
        if not self.due(step):
            return
        shape, expected = [len(group) for group in rewards], [len(group.trajectories) for group in groups]
        if shape != expected:
            raise ValueError(f"rewards of shape {shape} for groups of shape {expected}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            for p, g, why in pick(rewards):
                record = _record(step, groups[p], g, float(rewards[p][g]), why)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


class RolloutWriter:
    """Writes the whole rollout batch of every `every`-th step (0: none) to `folder`, one JSON object per trajectory, in
    the order of the groups. docs/metrics.md lists the fields. A file is complete or absent.

    The numbers are those of the trajectory: a float32 log-prob read back is the same float32.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def write(self, step: int, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Write the batch. `scores[p][g]` is the score of `groups[p].trajectories[g]`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step:06d}.jsonl"
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            for p, (group, scores_G) in enumerate(zip(groups, scores, strict=True)):
                for g, score in zip(range(len(group.trajectories)), scores_G, strict=True):
                    file.write(json.dumps(_whole_record(step, p, group, g, score), ensure_ascii=False) + "\n")
        partial.replace(path)


def _whole_record(step: int, place: int, group: Group, g: int, score: Score) -> dict:
    trajectory = group.trajectories[g]

    def of_sampled(values_R: np.ndarray) -> list:
        """Tokens of tools have no log-prob and no version."""
        return [value if sampled else None for value, sampled in
                zip(values_R.tolist(), trajectory.sampled.tolist(), strict=True)]

    return {
        "step": step, "group": place, "row": int(group.prompt.row), "sample": g, "engine": group.engine,
        "prompt": group.prompt.text, "completion": trajectory.text, "answer": group.prompt.answer,
        "reward": score.total if score.graded else None, "components": score.components, "status": score.status,
        "tokens": trajectory.length, "finish_reason": trajectory.finish_reason,
        "prompt_token_ids": group.prompt.token_ids.tolist(), "token_ids": trajectory.token_ids.tolist(),
        "logprobs": of_sampled(trajectory.logprobs), "weight_versions": of_sampled(trajectory.weight_versions),
    }


def _record(step: int, group: Group, g: int, reward: float, why: str) -> dict:
    trajectory = group.trajectories[g]
    return {
        "step": step, "why": why, "row": group.prompt.row, "sample": g, "prompt": group.prompt.text,
        "completion": trajectory.text, "answer": group.prompt.answer, "reward": round(reward, 6),
        "tokens": trajectory.length, "finish_reason": trajectory.finish_reason,
    }
