"""The input and the output of a reward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megatron_rl.data.batch import Group

Status = Literal["ok", "error", "timeout", "aborted"]


@dataclass(frozen=True)
class Sample:
    """The text of one trajectory to score. It holds plain values, because it crosses processes and is saved as JSON.
    """

    completion: str
    answer: str | None
    prompt: str = ""
    columns: dict[str, Any] = field(default_factory=dict)
    """The data row's other columns, offered to the reward as keyword arguments."""
    finish_reason: str = "stop"
    completion_tokens: int = 0
    """Number of tokens sampled by the policy."""
    prompt_index: int = -1
    """Row in the file."""
    sample_index: int = -1
    """Position in its group."""

    @property
    def name(self) -> str:
        return f"prompt {self.prompt_index}, sample {self.sample_index}"


@dataclass(frozen=True)
class Score:
    """The result for one sample. A wrong answer (`ok`, low total), a reward that failed (`error`), one that hung
    (`timeout`) and an answer that an engine did not finish (`aborted`) are different outcomes; only the first says
    anything about the policy."""

    total: float
    """Sum over functions of weight x value; NaN unless the status is `ok`, so that nobody takes it for a reward."""
    components: dict[str, float] = field(default_factory=dict)
    """Unweighted value per function. After a failure, only the values computed before it."""
    status: Status = "ok"
    detail: str = ""
    """Reason of the failure: the function and its exception, or how its process ended."""
    function: str = ""
    """The function that failed."""
    seconds: float = field(default=0.0, compare=False)
    """How long a reward process was busy with the sample."""

    @staticmethod
    def failed(status: Status, detail: str, function: str = "", components: Mapping[str, float] | None = None) -> Score:
        """The score of a sample that has no reward."""
        return Score(math.nan, dict(components or {}), status, detail, function)

    @property
    def graded(self) -> bool:
        """Whether the sample has a reward."""
        return self.status == "ok"

    @property
    def reward_failed(self) -> bool:
        return self.status in ("error", "timeout")


ABORTED = Score.failed("aborted", "an engine aborted it")


def group_samples(group: Group) -> list[Sample]:
    """The trajectories of a group as samples, in the group's order."""
    prompt = group.prompt
    return [Sample(completion=trajectory.text, answer=prompt.answer, prompt=prompt.text, columns=dict(prompt.columns),
                   finish_reason=trajectory.finish_reason, completion_tokens=trajectory.length,
                   prompt_index=int(prompt.row), sample_index=i)
            for i, trajectory in enumerate(group.trajectories)]


def group_rewards(group: Group, scores: Sequence[Score]) -> np.ndarray:
    """The total rewards of a group, float64 [G]. NaN for a trajectory that is neither right nor wrong, because an
    engine aborted it or its reward failed. It is in neither the baseline nor the loss."""
    return np.array([score.total if trajectory.finish_reason != "abort" else math.nan
                     for trajectory, score in zip(group.trajectories, scores, strict=True)], dtype=np.float64)


def counted_rewards(group: Group, scores: Sequence[Score]) -> np.ndarray:
    """The rewards of a group that the advantage uses: `group_rewards` without NaN."""
    rewards_G = group_rewards(group, scores)
    return rewards_G[~np.isnan(rewards_G)]
