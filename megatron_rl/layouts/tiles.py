"""Tiles describe how a local parameter is made of boxes of canonical (Hugging Face) tensors. Integers only, no torch.

Both sides of a sync use tiles. The trainer's layout describes a Megatron rank, and the traced vLLM layout describes a
rollout worker. Their intersections are the copies. Loading and export use the same layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """A box of a canonical tensor, and its position in a local parameter.

    The box is `[start[d], start[d] + shape[d])` along each dimension of `tensor`. In the local parameter it is the
    strided view (`shape`, `stride`, `offset`), in elements counted from the parameter's first element: see `tile_view`.
    """

    tensor: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.start, self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in its canonical tensor."""
        return box_slices(self.start, self.shape)


@dataclass(frozen=True)
class ParamLayout:
    """A local parameter: its name on that side, its shape, and its tiles. Elements outside all tiles are padding, which
    is never sent and never digested."""

    name: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]

    @property
    def padding(self) -> int:
        """Number of elements outside all tiles. Tiles of a parameter do not overlap."""
        return prod(self.shape) - sum(tile.numel for tile in self.tiles)


@dataclass(frozen=True)
class CanonicalTensor:
    """A tensor of the Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


def some(names: Sequence[str], separator: str = ", ") -> str:
    """The first names of a list that may be long, for messages."""
    return separator.join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])])


def box_slices(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Index of the box [start, start + shape) in a tensor."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= extent
    return tuple(reversed(stride))


def tile_view(parameter: Tensor, tile: Tile) -> Tensor:
    """The elements of `tile` in `parameter`, as a view of shape `tile.shape`.

    The parameter must be contiguous, because tiles count from its first element in row-major order. It may be a view
    into a larger buffer, like the parameters of Megatron's DDP.
    """
    if not parameter.is_contiguous():
        raise ValueError(f"a tile of {tile.tensor} addresses a parameter that is not contiguous "
                         f"(shape {tuple(parameter.shape)}, stride {parameter.stride()})")
    return parameter.detach().as_strided(tile.shape, tile.stride, parameter.storage_offset() + tile.offset)


def intersect(source: Tile, destination: Tile) -> tuple[Tile, Tile] | None:
    """The common box of two tiles, as seen from each side; None if they share no element."""
    if source.tensor != destination.tensor:
        return None
    start = tuple(max(a, b) for a, b in zip(source.start, destination.start, strict=True))
    stop = tuple(min(a + n, b + m) for a, n, b, m in
                 zip(source.start, source.shape, destination.start, destination.shape, strict=True))
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    if any(extent <= 0 for extent in shape):
        return None
    return cut(source, start, shape), cut(destination, start, shape)


def cut(tile: Tile, start: tuple[int, ...], shape: tuple[int, ...]) -> Tile:
    """The part of `tile` that is the box (`start`, `shape`) of its canonical tensor. The tile must contain the box."""
    offset = tile.offset + sum((a - b) * s for a, b, s in zip(start, tile.start, tile.stride, strict=True))
    return Tile(tile.tensor, start, shape, tile.stride, offset)
