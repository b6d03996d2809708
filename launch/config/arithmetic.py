"""Arithmetic of sizes that the configuration, its checks and the planner share."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def sequence_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """What each sequence's length is padded to a multiple of: 2 CP for the zig-zag split over CP > 1 ranks, times TP
    when sequence parallelism splits each of those parts over TP."""
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)
