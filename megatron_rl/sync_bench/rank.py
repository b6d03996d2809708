"""A training rank without a trainer: Megatron's layout over plain tensors, sent by the real `WeightSender`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from launch.model.architecture import Architecture
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts.digest import BITS
from megatron_rl.layouts.megatron import megatron_layout
from megatron_rl.layouts.tiles import ParamLayout, Tile, tile_view
from megatron_rl.weight_sync.ends.sender import WeightSender


class TrainerRank:
    """Runs in a member process. Its `sync_*` methods are the sender's own."""

    def __init__(self, architecture: Architecture, training: TrainingPlan, rank: int, dtype: str, address: str,
                 device: str) -> None:
        torch.set_num_threads(1)
        self.layouts = megatron_layout(architecture, training, rank, "local")
        self.parameters = {layout.name: torch.zeros(layout.shape, dtype=getattr(torch, dtype), device=device)
                           for layout in self.layouts}
        self._sender = sender = WeightSender(training.ranks[rank], self.layouts, self.parameters, address=address)
        self.sync_describe, self.sync_open = sender.sync_describe, sender.sync_open
        self.sync_send, self.sync_discard = sender.sync_send, sender.sync_discard

    def staging_bytes(self) -> int:
        """Bytes of the sender's buffers."""
        return self._sender.staging_bytes

    def fill(self, version: int) -> int:
        """Write the weights of a version, as an optimizer step would: equal on every rank that holds an element.
        Returns the number of bytes that this rank holds."""
        fill(self.layouts, self.parameters, version)
        return sum(parameter.nbytes for parameter in self.parameters.values())


def fill(layouts: Iterable[ParamLayout], parameters: Mapping[str, torch.Tensor], version: int) -> None:
    """Fill with bit patterns that depend on tensor, row, column and version."""
    for layout in layouts:
        bits = parameters[layout.name].view(BITS[parameters[layout.name].element_size()])
        for tile in layout.tiles:
            tile_view(bits, tile).copy_(_pattern(tile, bits.dtype, version))


def _pattern(tile: Tile, dtype: torch.dtype, version: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.blake2b(f"{tile.tensor} {version}".encode(), digest_size=3).digest(), "little")
    pattern = torch.full((), seed, dtype=torch.int64)
    for axis, (start, extent) in enumerate(zip(tile.start, tile.shape, strict=True)):
        along = torch.arange(start + 1, start + extent + 1, dtype=torch.int64) * (2_654_435_761 + 97 * axis)
        pattern = pattern.unsqueeze(-1) + (along >> 5)
    return pattern.to(dtype)
