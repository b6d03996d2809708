"""Time that rewards add to a step. Groups are graded as they are completed, by `reward.workers` processes on each node
that trains, so most of it is hidden behind the generation of other groups.

With R seconds of generation, W seconds of grading if no process ever waits, and n parts of equal work that are complete
at c_1 <= ... <= c_n = R, grading ends at least as late as (a server with a queue; Lindley 1952)

    max(W, max over j of c_j + (1 - j / n) W)

What is left at R is exposed, and after it the last group itself. Rewards set the pace when W exceeds R: the processes
grade less than the engines generate. If groups of several steps are generated at a time, there is no last completion
of a step: the step then takes at least W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.coefficients.reward import RewardCoefficients
from launch.plan.book import line, part
from launch.planner.workload.workload import Workload


@dataclass(eq=False)
class RewardTime:
    """Grading of one step."""

    PREFIX = "reward"

    workload: Workload
    workers: int
    """Reward processes of a node."""
    nodes: int
    """Nodes that train."""
    rollout_s: float
    completions: tuple[float, ...]
    """`RolloutTime.completions`."""
    c: RewardCoefficients

    @line("s", lambda self: "workload.reward_s" if self.workload.reward_s else
          "t_sample + math x t_math + texts x t_token x response + own functions x t_user")
    @part
    def sample_s(self) -> float:
        """Seconds of a process for a completion."""
        return self.of_sample(self.c.math_s, self.c.token_s, self.c.user_s)

    @line("processes", "reward.workers x training nodes")
    @part
    def processes(self) -> int:
        return self.workers * self.nodes

    @line("s", "completions x sample / processes")
    @part
    def busy_s(self) -> float:
        """W: seconds of a step for which all processes grade."""
        return self.workload.generated_prompts * self.workload.group * self.sample_s / self.processes

    @line("s", "max(W, max over j of c_j + (1 - j/n) W), less the rollout")
    @part
    def behind_s(self) -> float:
        """Seconds of grading that are left when the last completion ends, without the last group."""
        return behind_seconds(self.rollout_s, self.busy_s, self.completions)

    @line("s", "ceil(G / reward.workers) x sample + call")
    @part
    def last_s(self) -> float:
        """Seconds of the last group, on one node."""
        return self.last_seconds(self.sample_s)

    @line("s", "behind + last group", key="phase.reward_s")
    @part
    def seconds(self) -> float:
        """From the end of a step's last completion to its last score."""
        return self.behind_s + self.last_s

    def last_seconds(self, sample_s: float) -> float:
        return math.ceil(self.workload.group / self.workers) * sample_s + self.c.call_s

    def of_sample(self, math_s: float, token_s: float, user_s: float) -> float:
        work = self.workload
        if work.reward_s is not None:
            return work.reward_s
        return (self.c.sample_s + work.math_rewards * math_s + work.text_rewards * token_s * work.lengths.mean
                + work.own_rewards * user_s)

    @property
    def spread(self) -> tuple[float, float]:
        """(least, most) seconds of a process for a completion."""
        if self.workload.reward_s is not None:
            return GIVEN[0] * self.sample_s, GIVEN[1] * self.sample_s
        return (self.of_sample(self.c.math_s_low, self.c.token_s_low, self.c.user_s_low),
                self.of_sample(self.c.math_s_high, self.c.token_s_high, self.c.user_s_high))

    def workers_needed(self, most_behind_s: float) -> int:
        """The least `reward.workers` that leave at most these seconds of grading behind the last completion."""
        def behind(workers: int) -> float:
            return behind_seconds(self.rollout_s, self.busy_s * self.workers / workers, self.completions)

        low, high = 0, self.workers
        while behind(high) > most_behind_s:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if behind(middle) <= most_behind_s else (middle, high)
        return high


GIVEN = (0.5, 2.0)
"""Range of `workload.reward_s`, relative to its value: a policy that learns writes other answers."""


def behind_seconds(rollout_s: float, busy_s: float, completions: Sequence[float]) -> float:
    """See `RewardTime.behind_s`.

    Args:
        rollout_s: R.
        busy_s: W.
        completions: c_j / R for each j; empty if groups of several steps are generated at a time.
    """
    n = len(completions)
    ends = (share * rollout_s + (1 - (j + 1) / n) * busy_s for j, share in enumerate(completions))
    return max(busy_s, rollout_s, *ends) - rollout_s
