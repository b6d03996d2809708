"""Tiles as two-dimensional boxes with the seeds of their keys: what every implementation of the digest works on.

The keys are pseudo-random odd 64-bit numbers. Row r and column c of a box have

    row key      mix(row_seed    + (r + 1) * GOLDEN) | 1
    column key   mix(column_seed + (c + 1) * GOLDEN) | 1

where mix is splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). The
seeds hold the box's position, so a box may begin anywhere in its canonical tensor. No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from megatron_rl.layouts.tiles import Tile

MASK = (1 << 64) - 1
OFFSET = (1 << 40) + 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_COLUMN_SEED = 0x5851F42D4C957F2D


class Box(NamedTuple):
    """Rows and columns of a canonical tensor, all other coordinates being fixed, and where a parameter holds them."""

    row_seed: int
    column_seed: int
    rows: int
    columns: int
    offset: int
    """Of the first element, in elements from the parameter's first one."""
    row_stride: int
    column_stride: int


def boxes_of(tile: Tile) -> Iterator[Box]:
    """The boxes of a tile: one per combination of its coordinates before the last two."""
    if not tile.numel:
        return
    *leading, columns = tile.shape
    column_seed = (_COLUMN_SEED + tile.start[-1] * GOLDEN) & MASK
    if not leading:
        # The row key of a vector is its name's seed itself. The finaliser is invertible, so there is a seed for it.
        yield Box((unmix(_name_seed(tile.tensor)) - GOLDEN) & MASK, column_seed, 1, columns, tile.offset, 0,
                  tile.stride[-1])
        return
    for index in product(*map(range, leading[:-1])):
        seed, offset = _name_seed(tile.tensor), tile.offset
        for i, start, stride in zip(index, tile.start, tile.stride, strict=False):
            seed = mix(seed + (start + i + 1) * GOLDEN)
            offset += i * stride
        yield Box((seed + tile.start[-2] * GOLDEN) & MASK, column_seed, leading[-1], columns, offset, tile.stride[-2],
                  tile.stride[-1])


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x &= MASK
    x = (x ^ x >> 30) * FIRST_MULTIPLIER & MASK
    x = (x ^ x >> 27) * SECOND_MULTIPLIER & MASK
    return x ^ x >> 31


def unmix(x: int) -> int:
    """The number of which `mix` makes `x`."""
    x = _unshift(x, 31) * pow(SECOND_MULTIPLIER, -1, MASK + 1) & MASK
    x = _unshift(x, 27) * pow(FIRST_MULTIPLIER, -1, MASK + 1) & MASK
    return _unshift(x, 30)


def _unshift(x: int, by: int) -> int:
    """The y with y ^ y >> by == x. Three terms are enough for 64 bits and shifts of at least 22."""
    return x ^ x >> by ^ x >> 2 * by


@lru_cache(maxsize=1 << 16)
def _name_seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
