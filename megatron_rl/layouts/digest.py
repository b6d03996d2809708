"""A digest of tiles that does not depend on how the elements are split into tiles and detects any change of position.

The digest of a set of elements of canonical tensors is a sum modulo 2^64,

    digest = sum over elements of (bits + OFFSET) * row_key(tensor, leading coordinates) * column_key(last coordinate)

`bits` is the element's bit pattern as a signed integer. The keys are pseudo-random odd 64-bit numbers (`digest_boxes`).
This is the multilinear universal hash (Carter and Wegman 1979) over canonical positions, so:

- it is additive: the digest of a worker is the sum of the digests of what each source sent, however it was split;
- a single changed element always changes it, because the keys are odd and therefore invertible;
- swapped elements, rows or tiles, and a tile that is dropped, doubled or put into another tensor, change it except with
  a probability near 2^-47 (16-bit elements; 2^-31 for two swapped elements of 32 bits), because positions have keys
  and OFFSET gives even an all-zero tile a weight.

It guards against faults, not against an adversary. All arithmetic is in integers with wrap-around, equal on all
devices. Folders of weights hold digests (`disk_check`), so the function must not change.

The sum factorises, which is why it is cheap: a row's elements are summed with their column keys alone, or a column's
with their row keys alone, and the other key multiplies the sum. Elements are read once and nothing of their size is
written. A CPU does this in a compiled loop (`digest_cpu`), a GPU in one kernel for any number of tiles
(`digest_triton`), or in torch's operations where that kernel cannot run (`digest_torch`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.layouts import digest_torch
from megatron_rl.layouts.digest_boxes import MASK, boxes_of
from megatron_rl.layouts.tiles import ParamLayout, Tile

if TYPE_CHECKING:
    from megatron_rl.layouts.digest_triton import BoxTable

log = logging.getLogger(__name__)

MODULUS = MASK + 1
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> the integer type that shows its bits."""
_TABLES = 2
"""Tables of addresses that a digester keeps: one for the live weights, one for their second copy."""
_fused = True
"""Whether the fused kernel may be tried on a GPU."""


def digest_tiles(parameter: Tensor, tiles: Iterable[Tile]) -> int:
    """Digest of the elements of `parameter` named by `tiles`. See `Digester.total`."""
    return Digester([ParamLayout("", (), tuple(tiles))]).total({"": parameter})


def digest_layouts(layouts: Iterable[ParamLayout], parameters: Mapping[str, Tensor]) -> int:
    """Digest of all tiles of `layouts`. See `Digester.total`."""
    return Digester(layouts).total(parameters)


def compile_for(parameters: Iterable[Tensor]) -> None:
    """Compile the digest for the device of parameters and the sizes of their elements, so that the first digest, which
    others may wait for, takes no longer than the next."""
    one = Digester([ParamLayout("", (1,), (Tile("", (0,), (1,), (1,), 0),))])
    for parameter in {each.element_size(): each for each in parameters}.values():
        one.total({"": torch.zeros(1, dtype=parameter.dtype, device=parameter.device)})


def add(*digests: int) -> int:
    """The digest of a union of disjoint sets of elements."""
    return sum(digests) % MODULUS


class Digester:
    """Digests of the same tiles, sync after sync. What depends on the tiles alone is computed once."""

    def __init__(self, layouts: Iterable[ParamLayout]) -> None:
        layouts = tuple(layouts)
        self._names = [layout.name for layout in layouts]
        self._boxes = [tuple(box for tile in layout.tiles for box in boxes_of(tile)) for layout in layouts]
        self._tables: dict[tuple, BoxTable] = {}

    def total(self, parameters: Mapping[str, Tensor]) -> int:
        """Digest of all tiles, in [0, 2^64).

        Elements have 1, 2 or 4 bytes (fp8, bf16, fp16, fp32). The parameters are contiguous and on one device. A GPU
        takes one launch, and one copy of the result to the host, for which this waits.
        """
        return self._digests(parameters, [0] * len(self._names), 1)[0]

    def each(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """Digest of each layout's tiles, by its name. Otherwise like `total`."""
        found = self._digests(parameters, list(range(len(self._names))), len(self._names))
        return dict(zip(self._names, found, strict=True))

    def _digests(self, parameters: Mapping[str, Tensor], cells: Sequence[int], count: int) -> list[int]:
        """Digests of `count` groups of layouts; `cells` names the group of each layout."""
        if not self._names:
            return [0] * count
        bits = [_bits(parameters[name], name) for name in self._names]
        devices = {tensor.device for tensor in bits}
        if len(devices) > 1:
            raise ValueError(f"a digest needs its parameters on one device, these are on {sorted(map(str, devices))}")
        if bits[0].device.type == "cpu":
            from megatron_rl.layouts import digest_cpu  # numba takes 100 MB of memory, which a GPU's process spares
            found = digest_cpu.digests(bits, self._boxes, cells, count)
        else:
            found = self._on_gpu(bits, cells, count)
        return [digest % MODULUS for digest in found]

    def _on_gpu(self, bits: Sequence[Tensor], cells: Sequence[int], count: int) -> list[int]:
        global _fused
        if _fused:
            try:
                return self._table(bits, cells, count).results().tolist()
            except Exception as error:
                _fused = False
                log.warning("the fused digest of weights does not run here, torch's operations take its place and move "
                            "17 times the bytes: %s: %s", type(error).__name__, error)
        return digest_torch.digests(bits, self._boxes, cells, count)

    def _table(self, bits: Sequence[Tensor], cells: Sequence[int], count: int) -> BoxTable:
        from megatron_rl.layouts.digest_triton import BoxTable  # only GPUs have Triton

        key = (count, *((tensor.data_ptr(), tensor.dtype) for tensor in bits))
        if key not in self._tables:
            while len(self._tables) >= _TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = BoxTable(bits, self._boxes, cells, count)
        return self._tables[key]


def _bits(parameter: Tensor, name: str) -> Tensor:
    if parameter.element_size() not in BITS:
        raise TypeError(f"no digest for elements of {parameter.dtype}: an element must have 1, 2 or 4 bytes")
    if not parameter.is_contiguous():
        raise ValueError(f"no digest of {name}, which is not contiguous (shape {tuple(parameter.shape)}, stride "
                         f"{parameter.stride()})")
    return parameter.detach().view(BITS[parameter.element_size()])
