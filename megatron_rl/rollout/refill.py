"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): which groups are replaced, why, and when it is hopeless."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from launch.errors import UserError
from megatron_rl.algorithms.advantages import is_flat
from megatron_rl.data.batch import Group
from megatron_rl.rewards.sample import Score, counted_rewards

Reason = Literal["right", "wrong", "other"]
Replaced = tuple[Group, list[Score]]
KEY = "algorithm.dynamic_sampling.max_refill"
SHOWN = 5
"""Samples in the message."""
EXCERPT = 100
"""Characters of a sample's completion in the message."""
VERDICTS: dict[Reason, tuple[str, str]] = {
    "right": ("the prompts are too easy", "train on harder prompts (data.train, data.curriculum), or end the run here"),
    "wrong": ("the prompts are too hard",
              "train on easier prompts (data.train, data.curriculum), or raise algorithm.group_size or {key}"),
    "other": ("the reward is broken", "correct reward.functions: it must tell a right answer (1 or more) from a wrong "
                                      "one (0 or less)")}
"""What a batch that cannot be filled says about the run, and what to do."""


def has_spread(group: Group, scores: Sequence[Score]) -> bool:
    """Whether the advantages of a group differ: it has two trajectories with different rewards."""
    rewards_G = counted_rewards(group, scores)
    return len(rewards_G) > 1 and not is_flat(rewards_G)


def reason(group: Group, scores: Sequence[Score]) -> Reason:
    """Why a group has no spread. `other`: one reward that means neither right nor wrong, most scores failed, or fewer
    than two trajectories have a reward."""
    rewards_G = counted_rewards(group, scores)
    if len(rewards_G) < 2 or 2 * sum(score.reward_failed for score in scores) > len(scores):
        return "other"
    return "right" if rewards_G.min() >= 1.0 else "wrong" if rewards_G.max() <= 0.0 else "other"


def metrics(replaced: Sequence[Replaced], trained: int) -> dict[str, float]:
    """What a batch cost, by metric name."""
    counts = Counter(reason(*each) for each in replaced)
    return {"group/replaced_right": float(counts["right"]), "group/replaced_wrong": float(counts["wrong"]),
            "group/replaced_other": float(counts["other"]),
            "group/generated_per_trained": (trained + len(replaced)) / trained}


class CannotBeFilled(UserError):
    """The reserve of a batch is used up, and too few of its groups have spread."""

    @classmethod
    def of(cls, step: int, flat: Sequence[Replaced], wanted: int, generated: int) -> CannotBeFilled:
        """The verdict is the commonest reason.

        Args:
            flat: all groups of batch `step` without spread, in the order of the draw.
            wanted: number of groups that the batch trains.
            generated: number of its groups.
        """
        counts = Counter(reason(*each) for each in flat)
        verdict: Reason = max(VERDICTS, key=lambda each: counts[each])
        what, fix = VERDICTS[verdict]
        shown = [each for each in flat if reason(*each) == verdict][:SHOWN]
        lines = [f"step {step}: dynamic sampling generated {generated} groups, and {generated - len(flat)} of them "
                 f"have different rewards, where the batch needs {wanted} ({KEY} = {generated // wanted - 1}): {what}. "
                 f"All right: {counts['right']}, all wrong: {counts['wrong']}, neither: {counts['other']}",
                 *(f"  {_sample(*each)}" for each in shown)]
        return cls("\n".join(lines), where=f"{KEY}; data.train; reward.functions", fix=fix.format(key=KEY))


def _sample(group: Group, scores: Sequence[Score]) -> str:
    """The first completion of a group, in a line; one whose reward failed, if there is any."""
    at = next((i for i, score in enumerate(scores) if score.reward_failed), 0)
    score, text = scores[at], group.trajectories[at].text
    value = (f"{score.function} failed: {score.detail}" if score.reward_failed else
             f"reward {score.total:g}" if score.graded else score.detail)
    excerpt = text if len(text) <= EXCERPT else text[:EXCERPT] + "..."
    return f"row {group.prompt.row}, answer {group.prompt.answer!r}: {excerpt!r}: {value}"
