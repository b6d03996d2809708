"""The GRPO workload of a configuration, as the planner's models take it."""

from __future__ import annotations

from dataclasses import dataclass

from launch.config.load import LoadedConfig
from launch.errors import UserError
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


def workload_of(loaded: LoadedConfig) -> Workload:
    """The workload of a configuration.

    Raises:
        UserError: lengths that are impossible, such as a mean above the cap, or a file without lengths.
    """
    config = loaded.config
    asked, cap = config.workload.response, config.rollout.max_new_tokens
    longest_prompt = config.rollout.max_prompt_tokens
    prompt = config.workload.prompt_tokens or longest_prompt / 2
    if prompt > longest_prompt:
        raise UserError(f"workload.prompt_tokens = {prompt:g} is a mean above rollout.max_prompt_tokens = "
                        f"{longest_prompt}", where=loaded.where("workload.prompt_tokens", "rollout.max_prompt_tokens"),
                        fix=f"use a mean of at most {longest_prompt}, or a higher limit")
    kl = config.algorithm.kl
    return Workload(
        prompts=config.algorithm.prompts_per_step, group=config.algorithm.group_size,
        updates=config.algorithm.updates_per_batch, prompt_tokens=prompt, max_prompt_tokens=longest_prompt,
        lengths=_lengths(loaded, asked.distribution, cap), logprob_pass=config.algorithm.old_logprobs == "recompute",
        reference=kl.beta > 0, reference_offload=kl.reference_offload,
        target=config.workload.target_prompts_per_hour, measured_lengths=asked.distribution == "file")


def _lengths(loaded: LoadedConfig, distribution: str, cap: int) -> Lengths:
    asked = loaded.config.workload.response
    where = loaded.where("workload.response.distribution", "rollout.max_new_tokens")
    try:
        if distribution == "lognormal":
            if asked.mean is None and cap <= 4:     # a quarter of it would be less than a token
                return Counted.fixed(cap)
            return LogNormal(mean=asked.mean or max(1.0, cap / 4), sigma=asked.sigma, cap=cap)
        if distribution == "fixed":
            return Counted.of({round(asked.mean or cap): 1.0}, cap=cap)
        if distribution == "histogram":
            return Counted.of(_pairs(loaded), cap=cap)
        if asked.path is None:
            raise UserError("workload.response.distribution = file needs workload.response.path",
                            fix="name a JSONL of completions")
        return Counted.from_file(asked.path, cap)
    except UserError as error:
        raise UserError(error.what, where=error.where or where, fix=error.fix) from error


def _pairs(loaded: LoadedConfig) -> dict[int, float]:
    asked = loaded.config.workload.response
    values, counts = asked.values or [], asked.counts or []
    if not values or len(values) != len(counts):
        raise UserError(f"a histogram needs as many counts as values: {len(values)} values, {len(counts)} counts",
                        where=loaded.where("workload.response.values", "workload.response.counts"),
                        fix="write both lists with one entry a length")
    return dict(zip(values, counts, strict=True))
