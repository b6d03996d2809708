"""The work of a GRPO step, as the planner's models take it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from launch.planner.workload.lengths import Counted, Lengths, LogNormal


@dataclass(frozen=True)
class Workload:
    """What one GRPO step asks for."""

    prompts: int
    """Prompts a step."""
    group: int
    """G."""
    updates: int
    """Optimizer steps a GRPO step."""
    prompt_tokens: float
    """Mean."""
    max_prompt_tokens: int
    lengths: Lengths
    """Of the completions."""
    logprob_pass: bool
    """Old log-probs are recomputed by the trainer."""
    reference: bool
    reference_offload: bool
    target: float | None
    """Prompts an hour."""
    prompt_copies: float = 1.0
    """Copies of a prompt that are packed for each of its completions: 1, or 1 / G where they share one."""
    measured_lengths: bool = False
    """The lengths are those of completions in a file."""
    assumed_sigma: float | None = None
    """Shape of the log-normal that the lengths were asked to be; None: they are given."""
    assumed_mean: bool = False
    """Their mean follows the cap: it is not given."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def longest(self) -> int:
        return self.max_prompt_tokens + self.lengths.cap

    @property
    def mean_tokens(self) -> float:
        """Of a sequence, prompt and completion."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def packed_tokens(self) -> float:
        """That a sequence brings into a micro-batch, on average."""
        return self.prompt_copies * self.prompt_tokens + self.lengths.mean

    def capped(self, cap: int) -> Workload:
        """With another longest response. Raises UserError where the mean of the lengths does not go with it."""
        if self.assumed_sigma is not None and self.assumed_mean:
            return replace(self, lengths=assumed_lengths(None, self.assumed_sigma, cap))
        return replace(self, lengths=self.lengths.capped(cap))

    def with_means(self, response: float, prompt: float) -> Workload:
        """With these mean lengths, as a run had them: the log-normal that was asked for with this mean where one can
        have it, else the two whole lengths around it."""
        cap = self.lengths.cap
        response = min(float(cap), max(1.0, response))
        if self.assumed_sigma is not None and response < 0.95 * cap:
            lengths: Lengths = LogNormal(mean=response, sigma=self.assumed_sigma, cap=cap)
        else:
            low, high = math.floor(response), math.ceil(response)
            lengths = Counted.of({low: 1.0} if low == high else {low: high - response, high: response - low}, cap)
        return replace(self, lengths=lengths, prompt_tokens=min(prompt, self.max_prompt_tokens))


def assumed_lengths(mean: float | None, sigma: float, cap: int) -> Lengths:
    """Log-normal lengths under a cap; without a mean a quarter of the cap. Raises UserError where there are none."""
    if mean is None and cap <= 4:       # a quarter of it would be less than a token
        return Counted.fixed(cap)
    return LogNormal(mean=mean or max(1.0, cap / 4), sigma=sigma, cap=cap)
