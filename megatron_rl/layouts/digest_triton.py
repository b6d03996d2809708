"""The digest on a GPU: one kernel over a table of boxes (`digest_boxes`), which may lie in any number of parameters.

A program of the grid takes ROWS x COLUMNS elements of one box. It reads each element once, multiplies it by its row
key, sums over the rows, and multiplies the sums by the column keys, so keys cost little. It then adds its part to a
result with an atomic addition, whose order does not matter in integers.

An element costs two multiplications of 32 bits. With its row key = low + 2^32 high, and s = bits + half their range,
which has no sign,

    sum of s * key = sum of s * low + 2^32 * (sum of s * high mod 2^32)    modulo 2^64
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.layouts import digest_boxes
from megatron_rl.layouts.digest_boxes import Box

ROWS, COLUMNS = 32, 1024
"""Of one program: 64 KiB of bf16."""
_WARPS = 4
_VECTOR_BYTES = 16
"""What a thread loads at once if all addresses allow it."""
_FIELDS = ("address", "rows", "columns", "row stride", "column stride", "row seed", "column seed", "bytes an element",
           "aligned", "first program", "result")
"""Of a box in the table. Strides count elements."""
_FIRST_PROGRAM = _FIELDS.index("first program")
_OFFSET = tl.constexpr(digest_boxes.OFFSET)
_GOLDEN = tl.constexpr(digest_boxes.GOLDEN)
_FIRST = tl.constexpr(digest_boxes.FIRST_MULTIPLIER)
_SECOND = tl.constexpr(digest_boxes.SECOND_MULTIPLIER)


class BoxTable:
    """Boxes of parameters of one device, at their addresses.

    Args:
        bits: the parameters as integers of 1, 2 or 4 bytes, contiguous.
        boxes: of each parameter.
        cells: the result, of `count`, that each parameter's boxes add to.
    """

    def __init__(self, bits: Sequence[Tensor], boxes: Sequence[Iterable[Box]], cells: Sequence[int],
                 count: int) -> None:
        device = bits[0].device
        rows = [_row(tensor, box, cell) for tensor, mine, cell in zip(bits, boxes, cells, strict=True) for box in mine]
        table = np.array(rows, dtype=np.uint64).reshape(-1, len(_FIELDS)).view(np.int64)
        programs = -(-table[:, 1] // ROWS) * -(-table[:, 2] // COLUMNS)
        table[:, _FIRST_PROGRAM] = np.cumsum(programs) - programs
        self._table = torch.from_numpy(table).to(device)
        self._box_of_program = torch.from_numpy(np.repeat(np.arange(len(table), dtype=np.int32), programs)).to(device)
        self._results = torch.zeros(count, dtype=torch.int64, device=device)

    def results(self) -> Tensor:
        """The digests as signed numbers, shape (`count`,), by one launch. The next call overwrites them."""
        self._results.zero_()
        if len(self._box_of_program):
            with torch.cuda.device_of(self._results):
                _add_digests[len(self._box_of_program),](
                    self._table, self._box_of_program, self._results, FIELDS=len(_FIELDS), ROWS=ROWS, COLUMNS=COLUMNS,
                    num_warps=_WARPS)
        return self._results


def _row(bits: Tensor, box: Box, cell: int) -> tuple[int, ...]:
    size = bits.element_size()
    address = bits.data_ptr() + box.offset * size
    aligned = box.column_stride == 1 and all(
        each % _VECTOR_BYTES == 0 for each in (address, box.row_stride * size, box.columns * size))
    return (address, box.rows, box.columns, box.row_stride, box.column_stride, box.row_seed, box.column_seed, size,
            aligned, 0, cell)


@triton.jit
def _add_digests(table, box_of_program, results, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    box = table + tl.load(box_of_program + program).to(tl.int64) * FIELDS
    address = tl.load(box)
    rows = tl.load(box + 1).to(tl.int32)
    columns = tl.load(box + 2).to(tl.int32)
    row_stride = tl.load(box + 3)
    column_stride = tl.load(box + 4)
    row_seed = tl.load(box + 5).to(tl.uint64, bitcast=True)
    column_seed = tl.load(box + 6).to(tl.uint64, bitcast=True)
    size = tl.load(box + 7).to(tl.int32)
    aligned = tl.load(box + 8).to(tl.int32)
    block = program - tl.load(box + 9).to(tl.int32)
    across = tl.cdiv(columns, COLUMNS)
    first_row = block // across * ROWS
    stop_row = tl.minimum(first_row + ROWS, rows)
    first_column = block % across * COLUMNS

    if size == 1:
        if aligned == 1:
            sums_C = _aligned(address, tl.uint8, 16, first_row, stop_row, row_stride, row_seed, first_column, columns,
                              COLUMNS)
        else:
            sums_C = _anyhow(address, tl.int8, first_row, stop_row, row_stride, row_seed, first_column, columns,
                             column_stride, COLUMNS)
    elif size == 2:
        if aligned == 1:
            sums_C = _aligned(address, tl.uint16, 8, first_row, stop_row, row_stride, row_seed, first_column, columns,
                              COLUMNS)
        else:
            sums_C = _anyhow(address, tl.int16, first_row, stop_row, row_stride, row_seed, first_column, columns,
                             column_stride, COLUMNS)
    else:
        if aligned == 1:
            sums_C = _aligned(address, tl.uint32, 4, first_row, stop_row, row_stride, row_seed, first_column, columns,
                              COLUMNS)
        else:
            sums_C = _anyhow(address, tl.int32, first_row, stop_row, row_stride, row_seed, first_column, columns,
                             column_stride, COLUMNS)

    columns_C = first_column + tl.arange(0, COLUMNS)
    keys_C = _key(column_seed + (columns_C + 1).to(tl.uint64) * _GOLDEN)
    digest = tl.sum(tl.where(columns_C < columns, sums_C * keys_C, 0).to(tl.int64, bitcast=True))
    tl.atomic_add(results + tl.load(box + 10), digest, sem="relaxed")


@triton.jit
def _aligned(address, element: tl.constexpr, vector: tl.constexpr, first_row, stop_row, row_stride, row_seed,
             first_column, columns, COLUMNS: tl.constexpr):
    """Sums over the rows of (bits + OFFSET) * row key, by column, where a thread loads a vector of elements at once."""
    base = tl.multiple_of(address.to(tl.pointer_type(element)), 16)
    stride = row_stride // vector * vector
    columns_C = first_column + tl.arange(0, COLUMNS)
    inside_C = columns_C < columns // vector * vector
    half: tl.constexpr = 1 << (element.primitive_bitwidth - 1)
    low_C = tl.zeros([COLUMNS], tl.uint64)
    high_C = tl.zeros([COLUMNS], tl.uint32)
    keys = tl.zeros([], tl.uint64)
    seed = row_seed + first_row.to(tl.uint64) * _GOLDEN
    for row in tl.range(first_row, stop_row, loop_unroll_factor=4):
        shifted_C = tl.load(base + row * stride + columns_C, mask=inside_C, other=0) ^ half
        seed += _GOLDEN
        key = _key(seed)
        low_C += shifted_C.to(tl.uint64) * (key & 0xFFFFFFFF)
        high_C += shifted_C.to(tl.uint32) * (key >> 32).to(tl.uint32)
        keys += key
    return low_C + (high_C.to(tl.uint64) << 32) + keys * (_OFFSET - half)


@triton.jit
def _anyhow(address, element: tl.constexpr, first_row, stop_row, row_stride, row_seed, first_column, columns,
            column_stride, COLUMNS: tl.constexpr):
    """As `_aligned`, for any address and stride."""
    base = address.to(tl.pointer_type(element))
    columns_C = first_column + tl.arange(0, COLUMNS)
    sums_C = tl.zeros([COLUMNS], tl.uint64)
    seed = row_seed + first_row.to(tl.uint64) * _GOLDEN
    for row in tl.range(first_row, stop_row):
        bits_C = tl.load(base + row * row_stride + columns_C * column_stride, mask=columns_C < columns, other=0)
        seed += _GOLDEN
        sums_C += (bits_C.to(tl.int64).to(tl.uint64, bitcast=True) + _OFFSET) * _key(seed)
    return sums_C


@triton.jit
def _key(x):
    """mix(x) | 1"""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return (x ^ (x >> 31)) | 1
