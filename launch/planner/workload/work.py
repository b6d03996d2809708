"""The work of one optimizer step, as stated by a run or as packed from a workload under a layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from launch.plan.book import line, part
from launch.plan.layouts import TrainingLayout
from launch.planner.workload.lengths import Lengths
from launch.planner.workload.workload import Workload

PACKING = 0.97
"""Share of a micro-batch's token budget that longest-first packing fills, for many sequences that are short compared
with the budget."""


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """The work of one optimizer step over all ranks, as stated by a run."""

    sequences: int
    tokens: int
    """Tokens of the whole step (prompt and completion) without padding."""
    attention_length: float
    """E[t^2] / E[t] over the sequences. Causal attention costs as if all had this length."""
    micro_batch_tokens: int
    """Tokens of a micro-batch on a DP rank (all its CP ranks together), including padding."""
    micro_batches: int
    """Micro-batches of each DP rank."""
    longest: int
    """Tokens of the longest sequence."""


@dataclass(eq=False)
class PackedWork:
    """The work of one optimizer step of a workload under a layout: packed micro-batches of at most `token_budget`
    tokens. All DP ranks have the same number, which is a multiple of PP if the pipeline is interleaved."""

    PREFIX = "work"

    workload: Workload
    layout: TrainingLayout
    token_budget: int

    @line("sequences", "prompts x G / updates")
    @part
    def sequences(self) -> int:
        return self.workload.sequences // self.workload.updates

    @line("tokens", "sequences x (mean prompt x copies + mean response)")
    @part
    def tokens(self) -> int:
        return round(self.sequences * self.workload.packed_tokens)

    @line("tokens", "E[t^2] / E[t] over the sequences; where completions share a prompt, twice the pairs of tokens "
                    "over the tokens")
    def attention_length(self) -> float:
        workload = self.workload
        return _attention_length(workload.lengths, workload.prompt_tokens, workload.prompt_copies)

    @line("micro-batches of a DP rank", "tokens / (DP x budget x packing), rounded up, to a multiple of PP when "
                                        "interleaved")
    @part
    def micro_batches(self) -> int:
        layout, budget = self.layout, self.token_budget
        # A sequence is not split. One that just does not fit leaves, at worst, unused room of its own length.
        fill = min(PACKING, 1 - self.workload.packed_tokens / (2 * budget)) if self.sequences > layout.dp else 1.0
        micro_batches = max(1, math.ceil(self.tokens / (layout.dp * budget * max(fill, 0.5))))
        multiple = layout.pp if layout.vpp > 1 else 1
        return -(-micro_batches // multiple) * multiple

    @line("tokens", "tokens / (DP x micro-batches)")
    def micro_batch_tokens(self) -> int:
        return math.ceil(self.tokens / (self.layout.dp * self.micro_batches))

    @line("tokens", "longest prompt + cap")
    def longest(self) -> int:
        return self.workload.longest


Work = TrainingWork | PackedWork


@lru_cache(maxsize=64)
def _attention_length(lengths: Lengths, prompt: float, copies: float) -> float:
    """A completion attends to its prompt and to itself: p r + r^2/2 pairs. Each copy of a prompt attends to itself:
    p^2/2 pairs."""
    pairs = prompt * lengths.mean + lengths.second_moment / 2 + copies * prompt * prompt / 2
    return 2 * pairs / (copies * prompt + lengths.mean)
