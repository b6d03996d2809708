"""Staging of a weight sync: the buffers that a GPU keeps for buckets, from the opening to the end of the run. The plan
and the run compute it with the same functions.

A training rank has `SENDING` buffers. A receiver has *seats*, each with `RECEIVING` buffers: the streams that run at
the same time have one each, those of later slots take over the seats of earlier ones. A buffer is as large as the
largest bucket that it will hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from launch.fabric.estimate import RECEIVING, SENDING
from launch.fabric.lanes import Place
from launch.fabric.routes import ROOT, Route

HEADER_BYTES = 64
"""In front of a bucket. It keeps the payload aligned for every dtype."""


class Staging(NamedTuple):
    """Bytes of the buffers on the GPU that has the most."""

    training: int
    rollout: int


class Staged(NamedTuple):
    """One stream into a receiver."""

    slot: int
    bucket_bytes: int
    """Its largest bucket."""


def seats(streams: Sequence[Staged]) -> list[tuple[int, ...]]:
    """Numbers of the streams on each seat of a receiver, in their order. Streams of two consecutive slots never share
    one, because the first of a slot begin while the last of the slot before it end.

    Args:
        streams: in the order in which they begin: slot after slot.
    """
    slots = {slot: place for place, slot in enumerate(sorted({stream.slot for stream in streams}))}
    taken: list[list[int]] = []
    largest: list[int] = []
    for number, stream in enumerate(streams):
        free = [seat for seat, before in enumerate(taken)
                if slots[stream.slot] - slots[streams[before[-1]].slot] > 1]
        if not free:
            taken.append([number])
            largest.append(stream.bucket_bytes)
            continue
        # the smallest that is large enough, or the largest, which then grows
        seat = min(free, key=lambda seat: (largest[seat] < stream.bucket_bytes,
                                           abs(largest[seat] - stream.bucket_bytes), seat))
        taken[seat].append(number)
        largest[seat] = max(largest[seat], stream.bucket_bytes)
    return [tuple(numbers) for numbers in taken]


def sending_bytes(bucket_bytes: int) -> int:
    """Buffers of a training rank whose largest bucket has `bucket_bytes`; 0: it sends nothing."""
    return SENDING * (HEADER_BYTES + bucket_bytes) if bucket_bytes else 0


def receiving_bytes(streams: Sequence[Staged]) -> int:
    """Buffers of a receiver of these streams, in the order in which they begin."""
    return sum(RECEIVING * (HEADER_BYTES + max(streams[number].bucket_bytes for number in numbers))
               for numbers in seats(streams))


def staging(route: Route) -> Staging:
    """The buffers that a run over this route allocates."""
    sent: dict[Place, int] = defaultdict(int)
    into: dict[Place, list[tuple[int, int, int]]] = defaultdict(list)
    root_of: list[int] = []
    for number, edge in enumerate(route.edges):
        root_of.append(number if edge.parent == ROOT else root_of[edge.parent])
        bucket = min(route.chunk_bytes, edge.bytes)
        if edge.parent == ROOT:
            sent[edge.source] = max(sent[edge.source], bucket)
        into[edge.destination].append((edge.slot, root_of[number], bucket))
    return Staging(
        max((sending_bytes(bucket) for bucket in sent.values()), default=0),
        max((receiving_bytes([Staged(slot, bucket) for slot, _, bucket in sorted(streams)])
             for streams in into.values()), default=0))
