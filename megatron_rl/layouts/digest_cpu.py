"""The digest on a CPU: a compiled loop that reads every element once and stores none.

numba compiles it at its first use in a process, once per size of element (0.2 s), and keeps nothing on disk. It runs in
one thread, without Python's global lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numba
import numpy as np
from torch import Tensor

from megatron_rl.layouts import digest_boxes
from megatron_rl.layouts.digest_boxes import Box

BLOCK = 1 << 15
"""Columns whose keys are kept while rows pass: 256 KiB, which fits a core's second cache."""

# numba makes a float of a signed and an unsigned number, so every number is unsigned.
_u64 = np.uint64
_OFFSET, _GOLDEN = _u64(digest_boxes.OFFSET), _u64(digest_boxes.GOLDEN)
_FIRST, _SECOND = _u64(digest_boxes.FIRST_MULTIPLIER), _u64(digest_boxes.SECOND_MULTIPLIER)


def digests(bits: Sequence[Tensor], boxes: Sequence[Iterable[Box]], cells: Sequence[int], count: int) -> list[int]:
    """Arguments as for `digest_triton.BoxTable`."""
    results = [0] * count
    for tensor, mine, cell in zip(bits, boxes, cells, strict=True):
        elements = tensor.view(-1).numpy()
        for box in mine:
            results[cell] += int(_digest_box(
                elements, box.offset, box.row_stride, box.column_stride, box.rows, box.columns,
                _u64(box.row_seed), _u64(box.column_seed), BLOCK))
    return results


@numba.njit(nogil=True)
def _digest_box(elements, offset, row_stride, column_stride, rows, columns, row_seed, column_seed, block):
    keys_C = np.empty(min(block, columns), np.uint64)
    total = _u64(0)
    for first in range(0, columns, block):
        count = min(block, columns - first)
        offsets = _u64(0)                       # of a row: the sum of OFFSET * column key
        for c in range(count):
            keys_C[c] = _key(column_seed + _u64(first + c + 1) * _GOLDEN)
            offsets += _OFFSET * keys_C[c]
        r = 0
        if column_stride == 1:
            while r + 4 <= rows:                # four rows share the loads of the column keys
                at = offset + r * row_stride + first
                row_0 = elements[at:at + count]
                row_1 = elements[at + row_stride:at + row_stride + count]
                row_2 = elements[at + 2 * row_stride:at + 2 * row_stride + count]
                row_3 = elements[at + 3 * row_stride:at + 3 * row_stride + count]
                sum_0 = sum_1 = sum_2 = sum_3 = offsets
                for c in range(count):
                    key = keys_C[c]
                    sum_0 += _u64(row_0[c]) * key
                    sum_1 += _u64(row_1[c]) * key
                    sum_2 += _u64(row_2[c]) * key
                    sum_3 += _u64(row_3[c]) * key
                total += (sum_0 * _row_key(row_seed, r) + sum_1 * _row_key(row_seed, r + 1)
                          + sum_2 * _row_key(row_seed, r + 2) + sum_3 * _row_key(row_seed, r + 3))
                r += 4
        while r < rows:
            at = offset + r * row_stride + first * column_stride
            row_sum = offsets
            for c in range(count):
                row_sum += _u64(elements[at + c * column_stride]) * keys_C[c]
            total += row_sum * _row_key(row_seed, r)
            r += 1
    return total


@numba.njit
def _row_key(row_seed, row):
    return _key(row_seed + _u64(row + 1) * _GOLDEN)


@numba.njit
def _key(x):
    """mix(x) | 1"""
    x = (x ^ (x >> _u64(30))) * _FIRST
    x = (x ^ (x >> _u64(27))) * _SECOND
    return (x ^ (x >> _u64(31))) | _u64(1)
