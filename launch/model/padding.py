"""What sizes are rounded up to before they are divided over ranks: sequences, micro-batches, an engine's vocabulary."""

from __future__ import annotations

VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this before it divides by TP."""

TOKEN_BUDGET = 8192
"""Tokens of a micro-batch where the configuration says none and no sequence is longer."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def sequence_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """The multiple to which the length of each sequence is padded: 2 CP for the zig-zag split over CP > 1 ranks, times
    TP when sequence parallelism splits each of those parts over TP."""
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)


def token_budget(longest: int, multiple: int = 1) -> int:
    """Tokens of a micro-batch: 8192, or the longest sequence where that is longer, rounded up to `multiple`."""
    return round_up(max(TOKEN_BUDGET, longest), multiple)
