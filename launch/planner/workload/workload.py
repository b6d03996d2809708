"""The GRPO workload of a configuration, as the planner's models take it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from launch.config.load import LoadedConfig
from launch.errors import UserError
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import TrainingLayout, TrainingWork
from launch.planner.workload.lengths import Counted, Lengths, LogNormal

PACKING = 0.97
"""Share of a micro-batch's token budget that packing fills, longest first, where sequences are many and short against
the budget."""


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

    def write(self, book: Book, source: str) -> None:
        """Write the given numbers down."""
        for key, value, unit in (
                ("prompts", self.prompts, "prompts"), ("group", self.group, "completions a prompt"),
                ("updates", self.updates, "optimizer steps"), ("prompt_tokens", self.prompt_tokens, "tokens"),
                ("prompt_copies", self.prompt_copies, "copies a completion"),
                ("max_prompt_tokens", self.max_prompt_tokens, "tokens"), ("response_cap", self.lengths.cap, "tokens"),
                ("response_mean", self.lengths.mean, "tokens"),
                ("response_second_moment", self.lengths.second_moment, "tokens^2")):
            book.given(f"workload.{key}", value, unit, source)


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


def training_work(workload: Workload, layout: TrainingLayout, token_budget: int, book: Book = NO_BOOK) -> TrainingWork:
    """One optimizer step of a workload under a layout: packed micro-batches of at most `token_budget` tokens, as many on
    every DP rank, a multiple of PP where the pipeline is interleaved."""
    sequences = workload.sequences // workload.updates
    tokens = round(sequences * workload.packed_tokens)
    # A sequence is not split: one that just does not fit leaves, at worst, room of its own length.
    fill = min(PACKING, 1 - workload.packed_tokens / (2 * token_budget)) if sequences > layout.dp else 1.0
    micro_batches = max(1, math.ceil(tokens / (layout.dp * token_budget * max(fill, 0.5))))
    multiple = layout.pp if layout.vpp > 1 else 1
    micro_batches = -(-micro_batches // multiple) * multiple
    micro_batch_tokens = math.ceil(tokens / (layout.dp * micro_batches))
    attention_length = _attention_length(workload.lengths, workload.prompt_tokens, workload.prompt_copies)
    if book.keeps:
        given = ("workload.prompts", "workload.group", "workload.updates")
        book.computed("work.sequences", sequences, "sequences", "prompts x G / updates", given)
        lengths = ("workload.prompt_tokens", "workload.prompt_copies", "workload.response_mean")
        book.computed("work.tokens", tokens, "tokens", "sequences x (mean prompt x copies + mean response)",
                      ("work.sequences", *lengths))
        book.computed("work.attention_length", attention_length, "tokens", "E[t^2] / E[t] over the sequences; where "
                      "completions share a prompt, twice the pairs of tokens over the tokens",
                      (*lengths, "workload.response_second_moment"))
        book.computed("work.micro_batches", micro_batches, "micro-batches of a DP rank",
                      "tokens / (DP x budget x packing), rounded up, to a multiple of PP when interleaved",
                      ("work.tokens", "work.sequences", *lengths, "trainer.dp", "trainer.pp", "trainer.vpp",
                       "trainer.token_budget"))
        book.computed("work.micro_batch_tokens", micro_batch_tokens, "tokens", "tokens / (DP x micro-batches)",
                      ("work.tokens", "trainer.dp", "work.micro_batches"))
        book.computed("work.longest", workload.longest, "tokens", "longest prompt + cap",
                      ("workload.max_prompt_tokens", "workload.response_cap"))
    return TrainingWork(sequences=sequences, tokens=tokens, attention_length=attention_length,
                        micro_batch_tokens=micro_batch_tokens, micro_batches=micro_batches, longest=workload.longest)


@lru_cache(maxsize=64)
def _attention_length(lengths: Lengths, prompt: float, copies: float) -> float:
    """A completion attends to its whole prompt and to itself, the prompt to itself: p r + r^2/2, and p^2/2 a copy."""
    pairs = prompt * lengths.mean + lengths.second_moment / 2 + copies * prompt * prompt / 2
    return 2 * pairs / (copies * prompt + lengths.mean)


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
