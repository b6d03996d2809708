"""The work of a GRPO step, as input of the planner's models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from launch.planner.workload.lengths import Counted, Lengths, LogNormal


@dataclass(frozen=True)
class Workload:
    """The work of one GRPO step."""

    prompts: int
    """Prompts per step."""
    group: int
    """G: completions per prompt."""
    updates: int
    """Mini-batches of a GRPO step: optimizer steps of one epoch."""
    prompt_tokens: float
    """Mean tokens of a prompt."""
    max_prompt_tokens: int
    lengths: Lengths
    """Lengths of the completions."""
    logprob_pass: bool
    """The trainer recomputes the old log-probs."""
    reference: bool
    reference_offload: bool
    target: float | None
    """Target in prompts per hour."""
    epochs: int = 1
    """Passes of the optimizer over the completions."""
    teacher_offload: bool = False
    """The teacher (`Problem.teacher`) is in host memory between passes."""
    interpolated: bool = False
    """Old log-probs are interpolated, which costs nothing."""
    flat_groups: float = 0.0
    """Share of groups that dynamic sampling replaces: the engines generate 1 / (1 - share) groups for each trained one.
    """
    prompt_copies: float = 1.0
    """Packed copies of a prompt per completion: 1, or 1 / G if the completions share one."""
    math_rewards: int = 0
    """Number of reward functions `math`."""
    text_rewards: int = 0
    """Number of reward functions that only read the text: `exact_match`, `format`, `length`."""
    own_rewards: int = 0
    """Number of reward functions of the user."""
    reward_s: float | None = None
    """Seconds of a reward process for a completion; None: those of the functions."""
    measured_lengths: bool = False
    """The lengths come from a file of completions."""
    assumed_sigma: float | None = None
    """Shape of the assumed log-normal distribution; None: the lengths are given."""
    assumed_mean: bool = False
    """The mean is not given and follows from the cap."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def generated_prompts(self) -> int:
        """Prompts that the engines generate in a step."""
        return math.ceil(self.prompts / (1 - self.flat_groups) - 1e-9)

    @property
    def longest(self) -> int:
        return self.max_prompt_tokens + self.lengths.cap

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a sequence, prompt and completion."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def packed_tokens(self) -> float:
        """Mean tokens that a sequence adds to a micro-batch."""
        return self.prompt_copies * self.prompt_tokens + self.lengths.mean

    def capped(self, cap: int) -> Workload:
        """The workload with another cap. Raises UserError if the cap contradicts the mean length."""
        if self.assumed_sigma is not None and self.assumed_mean:
            return replace(self, lengths=assumed_lengths(None, self.assumed_sigma, cap))
        return replace(self, lengths=self.lengths.capped(cap))

    def with_means(self, response: float, prompt: float) -> Workload:
        """The workload with the mean lengths of a run. A log-normal distribution gets the mean if it can have it;
        otherwise the lengths are the two whole numbers around the mean."""
        cap = self.lengths.cap
        response = min(float(cap), max(1.0, response))
        if self.assumed_sigma is not None and response < 0.95 * cap:
            lengths: Lengths = LogNormal(mean=response, sigma=self.assumed_sigma, cap=cap)
        else:
            low, high = math.floor(response), math.ceil(response)
            lengths = Counted.of({low: 1.0} if low == high else {low: high - response, high: response - low}, cap)
        return replace(self, lengths=lengths, prompt_tokens=min(prompt, self.max_prompt_tokens))


def assumed_lengths(mean: float | None, sigma: float, cap: int) -> Lengths:
    """Log-normal lengths under a cap. The default mean is a quarter of the cap. Raises UserError for impossible
    lengths."""
    if mean is None and cap <= 4:       # a quarter of it would be less than a token
        return Counted.fixed(cap)
    return LogNormal(mean=mean or max(1.0, cap / 4), sigma=sigma, cap=cap)
