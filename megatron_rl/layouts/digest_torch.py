"""The digest by torch's own operations: on a GPU where the fused kernel cannot run. It moves 17 times the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_rl.layouts.digest_boxes import FIRST_MULTIPLIER, GOLDEN, MASK, OFFSET, SECOND_MULTIPLIER, Box

CHUNK = 1 << 22
"""Elements at once: 32 MiB of temporaries."""


def digests(bits: Sequence[Tensor], boxes: Sequence[Iterable[Box]], cells: Sequence[int], count: int) -> list[int]:
    """Arguments as for `digest_triton.BoxTable`."""
    results = torch.zeros(count, dtype=torch.int64, device=bits[0].device)
    for tensor, mine, cell in zip(bits, boxes, cells, strict=True):
        for box in mine:
            results[cell] += _digest_box(tensor, box)
    return results.tolist()


def _digest_box(bits: Tensor, box: Box) -> Tensor:
    """Sum over rows of row key * (sum over columns of (bits + OFFSET) * column key)."""
    bits_RC = bits.as_strided((box.rows, box.columns), (box.row_stride, box.column_stride),
                              bits.storage_offset() + box.offset)
    keys_C = _keys(box.column_seed, box.columns, bits.device)
    chunk_columns = min(box.columns, CHUNK)
    chunk_rows = min(box.rows, max(1, CHUNK // chunk_columns))
    scratch_RC = torch.empty(chunk_rows, chunk_columns, dtype=torch.int64, device=bits.device)
    sums_R = (OFFSET * keys_C.sum()).repeat(box.rows)
    for c in range(0, box.columns, chunk_columns):
        for r in range(0, box.rows, chunk_rows):
            part_RC = bits_RC[r:r + chunk_rows, c:c + chunk_columns]
            products_RC = scratch_RC[:part_RC.shape[0], :part_RC.shape[1]]
            products_RC.copy_(part_RC).mul_(keys_C[c:c + chunk_columns])
            sums_R[r:r + chunk_rows] += products_RC.sum(1)
    return (sums_R * _keys(box.row_seed, box.rows, bits.device)).sum()


def _keys(seed: int, count: int, device: torch.device) -> Tensor:
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(GOLDEN) + _signed(seed)
    x = (x ^ _shift_right(x, 30)) * _signed(FIRST_MULTIPLIER)
    x = (x ^ _shift_right(x, 27)) * _signed(SECOND_MULTIPLIER)
    return (x ^ _shift_right(x, 31)) | 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift; torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - MASK - 1 if x > MASK >> 1 else x
