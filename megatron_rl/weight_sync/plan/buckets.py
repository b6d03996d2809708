"""Copies packed into buckets of bounded size. Integers only, no torch.

A bucket is one message: the elements of its copies, one after the other. Its boundaries are decided here once and sent
in the manifest. Neither side derives them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from megatron_rl.layouts.tiles import Tile, cut

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element, by torch's name of the type."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of a canonical tensor that is copied from a source parameter into a destination parameter."""

    source: str
    """Parameter name on the training rank."""
    source_tile: Tile
    destination: str
    """Parameter name on the rollout worker."""
    destination_tile: Tile
    """The same box of the same tensor as `source_tile`."""
    dtype: str
    at: int = 0
    """Byte offset in the bucket. The box's elements follow in row-major order."""

    @property
    def nbytes(self) -> int:
        return self.source_tile.numel * ITEM_BYTES[self.dtype]

    def encode(self) -> list:
        """The copy as lists, strings and integers, for vLLM's msgpack RPC."""
        source, destination = self.source_tile, self.destination_tile
        return [self.source, self.destination, source.tensor, self.dtype, self.at, list(source.start),
                list(source.shape), list(source.stride), source.offset, list(destination.stride), destination.offset]

    @classmethod
    def decode(cls, plain: list) -> Copy:
        (source, destination, tensor, dtype, at, start, shape, source_stride, source_offset, destination_stride,
         destination_offset) = plain
        box = tensor, tuple(start), tuple(shape)
        return cls(source, Tile(*box, tuple(source_stride), source_offset),
                   destination, Tile(*box, tuple(destination_stride), destination_offset), dtype, at)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message of `nbytes`, filled by `copies` in order."""

    nbytes: int
    copies: tuple[Copy, ...]

    def encode(self) -> dict:
        return {"nbytes": self.nbytes, "copies": [copy.encode() for copy in self.copies]}

    @classmethod
    def decode(cls, plain: dict) -> Bucket:
        return cls(plain["nbytes"], tuple(Copy.decode(copy) for copy in plain["copies"]))


def pack(copies: Iterable[Copy], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets of at most `bucket_bytes` with `copies` in order, and split a box wherever a bucket is full.

    Each copy starts at a multiple of its element size, so a bucket with several types may have a few unused bytes.
    Copies without elements are dropped. Raises ValueError if a bucket cannot hold one element.
    """
    buckets: list[Bucket] = []
    filling: list[Copy] = []
    end = 0
    for copy in copies:
        item = ITEM_BYTES[copy.dtype]
        if bucket_bytes < item:
            raise ValueError(f"a bucket of {bucket_bytes} bytes cannot hold an element of {copy.dtype}")
        waiting = [copy.source_tile.box] if copy.source_tile.numel else []
        while waiting:
            start, shape = waiting.pop()
            at = -(-end // item) * item
            room = (bucket_bytes - at) // item
            if room <= 0:
                buckets.append(Bucket(end, tuple(filling)))
                filling, end = [], 0
                waiting.append((start, shape))
            elif prod(shape) <= room:
                filling.append(_part(copy, start, shape, at))
                end = at + prod(shape) * item
            else:
                waiting += reversed(list(_split(start, shape, room)))
    if filling:
        buckets.append(Bucket(end, tuple(filling)))
    return tuple(buckets)


def part_of(copies: Iterable[Copy], first: int, nbytes: int) -> list[Copy]:
    """The elements in bytes [first, first + nbytes) of `copies`, which are concatenated in order without gaps."""
    part, at, end = [], 0, first + nbytes
    for copy in copies:
        item = ITEM_BYTES[copy.dtype]
        low, high = max(first - at, 0) // item, min(end - at, copy.nbytes) // item
        if high > low:
            part += [_part(copy, start, shape, 0) for start, shape in _range(*copy.source_tile.box, low, high)]
        at += copy.nbytes
    return part


def _range(start: tuple[int, ...], shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[tuple, tuple]]:
    """Boxes that contain elements [low, high) of a box in row-major order."""
    if (low, high) == (0, prod(shape)):
        yield start, shape
        return
    d = next(d for d, extent in enumerate(shape) if extent > 1)
    size = prod(shape[d + 1:])

    def rows(first: int, last: int) -> tuple[tuple, tuple]:
        return (*start[:d], start[d] + first, *start[d + 1:]), (*shape[:d], last - first, *shape[d + 1:])

    (first, skipped), (last, rest) = divmod(low, size), divmod(high, size)
    if first == last:
        yield from _range(*rows(first, first + 1), skipped, rest)
        return
    if skipped:
        yield from _range(*rows(first, first + 1), skipped, size)
        first += 1
    if last > first:
        yield rows(first, last)
    if rest:
        yield from _range(*rows(last, last + 1), 0, rest)


def _split(start: tuple[int, ...], shape: tuple[int, ...], room: int) -> Iterator[tuple[tuple, tuple]]:
    """Two boxes. The first has as many whole rows as fit in `room`, or one row if none fits (cut again)."""
    d = next(d for d, extent in enumerate(shape) if extent > 1)
    rows = max(1, room // prod(shape[d + 1:]))
    yield start, (*shape[:d], rows, *shape[d + 1:])
    yield (*start[:d], start[d] + rows, *start[d + 1:]), (*shape[:d], shape[d] - rows, *shape[d + 1:])


def _part(copy: Copy, start: tuple[int, ...], shape: tuple[int, ...], at: int) -> Copy:
    return Copy(copy.source, cut(copy.source_tile, start, shape),
                copy.destination, cut(copy.destination_tile, start, shape), copy.dtype, at)
