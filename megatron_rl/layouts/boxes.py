"""Boxes inside a tensor: where a tile lies in its parameter, what two boxes share, and what they leave. Integers only.

Elements are never touched, so the parameters of a 70B model take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Protocol

from megatron_rl.layouts.tiles import contiguous_stride

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape, in the coordinates of a local parameter or of a canonical tensor."""


class NotABox(ValueError):
    """A view is not a box of its parameter: transposed, interleaved, or larger than it."""


class View(Protocol):
    """A strided view of a contiguous parameter, in elements counted from its first one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


def local_box(parameter: tuple[int, ...], view: View) -> Box:
    """The region of a view in the coordinates of its contiguous parameter of shape `parameter`.

    Raises NotABox if its strides are not those of the parameter (a transposed view) or if it exceeds the parameter.
    """
    strides = contiguous_stride(parameter)
    extent_of = {stride: extent for stride, extent in zip(view.stride, view.shape, strict=True) if extent > 1}
    start, shape, rest = [], [], view.offset
    for size, stride in zip(parameter, strides, strict=True):
        at, rest = divmod(rest, stride)
        extent = extent_of.pop(stride, 1) if size > 1 else 1
        start.append(at)
        shape.append(extent)
        if at + extent > size:
            raise NotABox(f"exceeds the parameter {parameter}: shape {view.shape}, offset {view.offset}, stride "
                          f"{view.stride}")
    if extent_of or rest:
        raise NotABox(f"is not a box of the parameter {parameter}: shape {view.shape}, offset {view.offset}, stride "
                      f"{view.stride}")
    return tuple(start), tuple(shape) if prod(view.shape) else (0,) * len(shape)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int, most: int) -> Iterator[Box]:
    """The boxes that hold the elements `start` to `stop` of a row-major tensor, in their order: whole rows, and at both
    ends parts of a row. Each has at most `most` elements, or is one row."""
    if start >= stop:
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row        # the whole rows
    if first > last:
        yield from _in_row(shape, last, start, stop, most)
        return
    yield from _in_row(shape, first - 1, start, first * row, most)
    step = max(1, most // row)
    for at in range(first, last, step):
        yield (at, *(0,) * (len(shape) - 1)), (min(step, last - at), *shape[1:])
    yield from _in_row(shape, last, last * row, stop, most)


def _in_row(shape: tuple[int, ...], at: int, start: int, stop: int, most: int) -> Iterator[Box]:
    row = prod(shape[1:])
    for inner_start, inner_shape in flat_boxes(shape[1:], start - at * row, stop - at * row, most):
        yield (at, *inner_start), (1, *inner_shape)


def first_overlap(boxes: Iterable[Box]) -> Box | None:
    """A region that two of the boxes share; None if they are pairwise disjoint. It sweeps along the dimension with the
    most distinct starts."""
    boxes = [box for box in boxes if prod(box[1])]
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0][0]))
    sweep = max(dims, key=lambda d: len({start[d] for start, _ in boxes}))
    open_boxes: list[Box] = []
    for start, shape in sorted(boxes, key=lambda box: box[0][sweep]):
        open_boxes = [box for box in open_boxes if box[0][sweep] + box[1][sweep] > start[sweep]]
        for other in open_boxes:
            shared = common((start, shape), other)
            if shared:
                return shared
        open_boxes.append((start, shape))
    return None


def subtract(box: Box, holes: Iterable[Box]) -> list[Box]:
    """The rest of `box` without `holes`, as disjoint boxes."""
    left = [box]
    for hole in holes:
        left = [piece for part in left for piece in _subtract_one(part, hole)]
    return left


def _subtract_one(box: Box, hole: Box) -> Iterator[Box]:
    shared = common(box, hole)
    if shared is None:
        yield box
        return
    start, shape = list(box[0]), list(box[1])
    for d, (a, n) in enumerate(zip(*shared, strict=True)):
        before, after = a - start[d], start[d] + shape[d] - (a + n)
        if before:
            yield tuple(start), (*shape[:d], before, *shape[d + 1:])
        if after:
            yield (*start[:d], a + n, *start[d + 1:]), (*shape[:d], after, *shape[d + 1:])
        start[d], shape[d] = a, n


def common(a: Box, b: Box) -> Box | None:
    """The region that two boxes share; None if there is none."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    stop = [min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True)]
    shape = tuple(e - s for s, e in zip(start, stop, strict=True))
    return (start, shape) if all(extent > 0 for extent in shape) else None


def box_text(box: Box) -> str:
    """The box as slices, for messages."""
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*box, strict=True)) + "]"
