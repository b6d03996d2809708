"""Padding of sizes before they are divided over ranks: sequences, micro-batches, an engine's vocabulary."""

from __future__ import annotations

VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (`vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE`)."""
TOKEN_BUDGET = 8192
"""Default number of tokens of a micro-batch."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def sequence_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """Sequence lengths are padded to a multiple of this: 2 CP for the zig-zag split over CP > 1 ranks, times TP if
    sequence parallelism splits each part over TP."""
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)


def token_budget(longest: int, multiple: int = 1) -> int:
    """Tokens of a micro-batch: 8192, or the longest sequence if that is longer, rounded up to `multiple`."""
    return round_up(max(TOKEN_BUDGET, longest), multiple)
