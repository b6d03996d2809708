"""A bucket on the wire: a header with epoch and number, then the elements of its copies in the manifest's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from launch.fabric.staging import HEADER_BYTES
from megatron_rl.layouts.tiles import ParamLayout, Tile, tile_view
from megatron_rl.weight_sync.plan.buckets import Bucket
from megatron_rl.weight_sync.plan.manifest import Edge
from megatron_rl.weight_sync.plan.streams import Stream

_MAGIC = 0x4D52_4C57
_POISON = -1


class WireError(RuntimeError):
    """A buffer does not hold the expected bucket: nothing was written to it, or another epoch's bucket."""


def buffer_bytes(parts: Sequence[Edge | Stream]) -> int:
    """Size of a buffer that fits any bucket of `parts` with its header; 0 if there is none."""
    return max((HEADER_BYTES + bucket.nbytes for part in parts for bucket in part.buckets), default=0)


def pack_bucket(bucket: Bucket, number: int, epoch: int, parameters: Mapping[str, torch.Tensor],
                buffer: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Write header and copies from the live source parameters. Returns the used part of `buffer` (uint8)."""
    buffer[:HEADER_BYTES].view(torch.int64)[:5].copy_(_header(bucket, number, epoch, stream))
    for copy in bucket.copies:
        _payload(buffer, copy.at, copy.source_tile, copy.dtype).copy_(tile_view(parameters[copy.source],
                                                                                copy.source_tile))
    return buffer[:HEADER_BYTES + bucket.nbytes]


def poison(buffer: torch.Tensor) -> torch.Tensor:
    """Mark a buffer before it is received into, so that its header shows if the transfer never happened."""
    buffer[:HEADER_BYTES].view(torch.int64).fill_(_POISON)
    return buffer


def check_header(bucket: Bucket, number: int, epoch: int, buffer: torch.Tensor, stream: int = 0) -> None:
    """Check the header before a bucket is written or forwarded.

    Raises:
        WireError: the buffer was never written, or holds another bucket, length, stream or epoch.
    """
    found = buffer[:HEADER_BYTES].view(torch.int64)[:5].tolist()
    if found == _header(bucket, number, epoch, stream).tolist():
        return
    if found[0] == _POISON:
        raise WireError(f"bucket {number} of epoch {epoch} never arrived: the buffer is unchanged")
    raise WireError(f"expected bucket {number} of epoch {epoch}, stream {stream}, with {bucket.nbytes} bytes, received "
                    f"bucket {found[2]} of epoch {found[1]}, stream {found[4]}, with {found[3]} bytes")


def unpack_bucket(bucket: Bucket, number: int, epoch: int, buffer: torch.Tensor,
                  parameters: Mapping[str, torch.Tensor], stream: int = 0) -> None:
    """Check the header (`check_header`), then write the copies straight into the live destination parameters."""
    check_header(bucket, number, epoch, buffer, stream)
    for copy in bucket.copies:
        tile_view(parameters[copy.destination], copy.destination_tile).copy_(
            _payload(buffer, copy.at, copy.destination_tile, copy.dtype))


def source_tiles(bucket: Bucket) -> tuple[ParamLayout, ...]:
    """Tiles that a bucket reads, by source parameter. The sender reports their digest."""
    return _by_parameter((copy.source, copy.source_tile) for copy in bucket.copies)


def destination_tiles(bucket: Bucket) -> tuple[ParamLayout, ...]:
    """Tiles that a bucket writes, by live parameter. The receiver reports their digest."""
    return _by_parameter((copy.destination, copy.destination_tile) for copy in bucket.copies)


def _by_parameter(tiles) -> tuple[ParamLayout, ...]:
    grouped: dict[str, list[Tile]] = {}
    for name, tile in tiles:
        grouped.setdefault(name, []).append(tile)
    return tuple(ParamLayout(name, (), tuple(parts)) for name, parts in grouped.items())


def _header(bucket: Bucket, number: int, epoch: int, stream: int) -> torch.Tensor:
    return torch.tensor([_MAGIC, epoch, number, bucket.nbytes, stream], dtype=torch.int64)


def _payload(buffer: torch.Tensor, at: int, tile: Tile, dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    start = HEADER_BYTES + at
    return buffer[start:start + tile.numel * kind.itemsize].view(kind).view(tile.shape)
