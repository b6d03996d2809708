"""A digest of tiles that does not depend on how the elements are split into tiles and detects any change of position.

The digest of a set of elements of canonical tensors is a sum modulo 2^64,

    digest = sum over elements of (bits + OFFSET) * row_key(tensor, leading coordinates) * column_key(last coordinate)

`bits` is the element's bit pattern as a signed integer. The keys are pseudo-random odd 64-bit numbers made by
splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). This is the
multilinear universal hash (Carter and Wegman 1979) over canonical positions, so:

- it is additive: the digest of a worker is the sum of the digests of what each source sent, however it was split;
- a single changed element always changes it, because the keys are odd and therefore invertible;
- swapped elements, rows or tiles, and a tile that is dropped, doubled or put into another tensor, change it except with
  a probability near 2^-47 (16-bit elements; 2^-31 for two swapped elements of 32 bits), because positions have keys
  and OFFSET gives even an all-zero tile a weight.

It guards against faults, not against an adversary. All arithmetic is int64 with wrap-around, equal on all devices. The
key is a product, so an element costs one conversion, one multiplication and one addition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from megatron_rl.layouts.tiles import ParamLayout, Tile, tile_view

MODULUS = 1 << 64
OFFSET = (1 << 40) + 1
_GOLDEN = 0x9E3779B97F4A7C15
_COLUMN_SEED = 0x5851F42D4C957F2D
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> the integer type that shows its bits."""
_CHUNK_ELEMENTS = {"cpu": 1 << 18}
_CHUNK_ELEMENTS_DEVICE = 1 << 22


def digest_tiles(parameter: Tensor, tiles: Iterable[Tile]) -> int:
    """Digest of the elements of `parameter` named by `tiles`, in [0, 2^64).

    Element types have 1, 2 or 4 bytes (fp8, bf16, fp16, fp32). It needs 2 MiB of temporaries on a CPU and 32 MiB on
    another device, for any size.
    """
    return _to_int(_digest(parameter, tiles))


def digest_layouts(layouts: Iterable[ParamLayout], parameters: Mapping[str, Tensor]) -> int:
    """Digest of all tiles of `layouts`, with a single transfer from the device."""
    total: Tensor | None = None
    for layout in layouts:
        part = _digest(parameters[layout.name], layout.tiles)
        total = part if total is None else total + part.to(total.device)
    return 0 if total is None else _to_int(total)


def digest_each(layouts: Iterable[ParamLayout], parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Digest of each layout's tiles, by its name, with a single transfer from the device."""
    parts = {layout.name: _digest(parameters[layout.name], layout.tiles) for layout in layouts}
    values = torch.stack(list(parts.values())).tolist() if parts else []
    return {name: value % MODULUS for name, value in zip(parts, values, strict=True)}


def add(*digests: int) -> int:
    """The digest of a union of disjoint sets of elements."""
    return sum(digests) % MODULUS


def _digest(parameter: Tensor, tiles: Iterable[Tile]) -> Tensor:
    if parameter.element_size() not in BITS:
        raise TypeError(f"no digest for elements of {parameter.dtype}: an element must have 1, 2 or 4 bytes")
    bits = parameter.detach().view(BITS[parameter.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=parameter.device)
    for tile in tiles:
        if tile.numel:
            total += _digest_box(tile_view(bits, tile), tile)
    return total


def _digest_box(bits: Tensor, tile: Tile) -> Tensor:
    """One tile: sum over rows of row_key * (sum over columns of (bits + OFFSET) * column_key)."""
    columns = tile.shape[-1]
    column_keys_C = _column_keys(bits.device, tile.start[-1], columns)
    row_keys_R = _row_keys(tile, bits.device)
    bits_RC = bits.reshape(-1, columns)
    rows = bits_RC.shape[0]
    chunk = _CHUNK_ELEMENTS.get(bits.device.type, _CHUNK_ELEMENTS_DEVICE)
    chunk_columns = min(columns, chunk)
    chunk_rows = min(rows, max(1, chunk // chunk_columns))
    scratch_RC = torch.empty(chunk_rows, chunk_columns, dtype=torch.int64, device=bits.device)

    sums_R = (OFFSET * column_keys_C.sum()).repeat(rows)
    for c in range(0, columns, chunk_columns):
        keys_C = column_keys_C[c:c + chunk_columns]
        for r in range(0, rows, chunk_rows):
            part_RC = bits_RC[r:r + chunk_rows, c:c + chunk_columns]
            products_RC = scratch_RC[:part_RC.shape[0], :part_RC.shape[1]]
            products_RC.copy_(part_RC).mul_(keys_C)
            sums_R[r:r + chunk_rows] += products_RC.sum(1)
    return (sums_R * row_keys_R).sum()


def _row_keys(tile: Tile, device: torch.device) -> Tensor:
    """One key per combination of leading coordinates, hashed one after the other, starting from the tensor's name."""
    keys = torch.tensor([_signed(_name_seed(tile.tensor))], dtype=torch.int64, device=device)
    for start, extent in zip(tile.start[:-1], tile.shape[:-1], strict=True):
        coordinates = torch.arange(start + 1, start + extent + 1, dtype=torch.int64, device=device)
        keys = _splitmix64(keys[:, None] + coordinates * _signed(_GOLDEN)).flatten()
    return keys | 1


@lru_cache(maxsize=64)
def _column_keys(device: torch.device, start: int, columns: int) -> Tensor:
    coordinates = torch.arange(start + 1, start + columns + 1, dtype=torch.int64, device=device)
    return _splitmix64(coordinates * _signed(_GOLDEN) + _signed(_COLUMN_SEED)) | 1


@lru_cache(maxsize=1 << 16)
def _name_seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _splitmix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift; torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - MODULUS if x >= MODULUS >> 1 else x


def _to_int(total: Tensor) -> int:
    return int(total.item()) % MODULUS
