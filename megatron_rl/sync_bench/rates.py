"""Copy and digest rates of one process on this machine, in bytes/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_rl.layouts.digest import digest_tiles
from megatron_rl.layouts.tiles import ParamLayout, Tile, contiguous_stride
from megatron_rl.sync_bench.rank import fill
from megatron_rl.weight_sync.plan.buckets import Bucket, Copy
from megatron_rl.weight_sync.wire.packing import HEADER_BYTES, pack_bucket, unpack_bucket

ROWS, COLUMNS = 4096, 4096
"""32 MiB in bf16, larger than a cache."""
REPEATS = 3


class Rates(NamedTuple):
    """The fastest of a few repeats, which nothing disturbed."""

    memcpy: float
    pack: float
    unpack: float
    digest: float


class RateProbe:
    """Runs in a member process."""

    def __init__(self, dtype: str, device: str) -> None:
        torch.set_num_threads(1)
        self._dtype, self._device = dtype, device

    @torch.no_grad()
    def measure(self) -> Rates:
        """Pack, unpack and digest columns of a matrix, as a TP rank holds them of a row-parallel weight."""
        shape = (ROWS, COLUMNS)
        tile = Tile("probe", (0, 0), shape, contiguous_stride(shape), 0)
        layout, kind = ParamLayout("probe", shape, (tile,)), getattr(torch, self._dtype)
        parameters = {"probe": torch.empty(shape, dtype=kind, device=self._device)}
        fill([layout], parameters, 0)
        size = parameters["probe"].nbytes
        buffer = torch.empty(HEADER_BYTES + size, dtype=torch.uint8, device=self._device)
        bucket = Bucket(size, (Copy("probe", tile, "probe", tile, self._dtype),))
        other = torch.empty_like(parameters["probe"])
        return Rates(memcpy=size / self._fastest(lambda: other.copy_(parameters["probe"])),
                     pack=size / self._fastest(lambda: pack_bucket(bucket, 0, 1, parameters, buffer)),
                     unpack=size / self._fastest(lambda: unpack_bucket(bucket, 0, 1, buffer, parameters)),
                     digest=size / self._fastest(lambda: digest_tiles(parameters["probe"], (tile,))))

    def _fastest(self, action: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            action()
            if self._device != "cpu":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        return best
