"""The tensor files of a checkpoint: several threads of a rank write its pieces, and read back what it needs.

Megatron's stock writer forks processes and starts a manager, which must not happen inside an actor that holds threads,
sockets and a GPU. Torch's writer loses the error of a thread. Files and index are theirs (`checkpoint_index`).
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_rl.layouts.boxes import Box, common
from megatron_rl.trainer.checkpoint_index import Stored, StoredTensor
from megatron_rl.trainer.checkpoint_pieces import PIECE_BYTES, Piece

THREADS = 4
"""Files that a rank writes or reads at a time."""
Moved = Callable[[int], None]
"""Told the bytes that were written or read."""


class Misfit(Exception):
    """The tensors of the checkpoint are not those of this model and optimizer."""


@dataclass(frozen=True)
class Written:
    """A piece after it was written."""

    key: str
    whole: tuple[int, ...]
    dtype: torch.dtype
    stored: Stored


def write(pieces: Collection[Piece], folder: Path, rank: int, moved: Moved) -> list[Written]:
    """Write the pieces that this rank must write into files of its own, `__<rank>_<i>.distcp`, synced.

    Raises:
        OSError: the file system refused.
    """
    bins: list[list[Piece]] = [[] for _ in range(THREADS)]
    sizes = [0] * THREADS
    for piece in sorted((piece for piece in pieces if piece.written), key=lambda piece: -piece.nbytes):
        least = sizes.index(min(sizes))
        bins[least].append(piece)
        sizes[least] += piece.nbytes
    with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        tasks = [pool.submit(_write_file, folder / f"__{rank}_{i}.distcp", each, moved)
                 for i, each in enumerate(bins) if each]
    return [written for task in tasks for written in task.result()]


def _write_file(path: Path, pieces: Sequence[Piece], moved: Moved) -> list[Written]:
    written: list[Written] = []
    unsynced = 0
    with path.open("wb") as file:
        sink = _Sink(file)
        for piece in pieces:
            offset = sink.size
            try:
                torch.save(_with_own_storage(piece.data), sink)     # type: ignore[arg-type]  # needs write and flush
            except RuntimeError as error:
                raise sink.error or error from error
            written.append(Written(piece.key, piece.whole, piece.data.dtype,
                                   Stored(piece.box, path.name, offset, sink.size - offset)))
            unsynced += piece.nbytes
            if unsynced >= PIECE_BYTES or piece is pieces[-1]:      # what is only in the page cache has not moved
                file.flush()
                os.fsync(file.fileno())
                moved(unsynced)
                unsynced = 0
    return written


class _Sink:
    """Remembers why a write failed: torch.save turns a full disk into `RuntimeError: unexpected pos 704 vs 598`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size = file, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.size += count
        return count

    def flush(self) -> None:
        pass


def _with_own_storage(data: torch.Tensor) -> torch.Tensor:
    """The same values in host memory, in a storage of that size: `torch.save` writes the whole storage of a view."""
    host = data.cpu()
    return torch.frombuffer(host.view(torch.uint8).reshape(-1).numpy().data, dtype=host.dtype).view(host.shape)


def together(written: Iterable[Written]) -> dict[str, StoredTensor]:
    """The tensors that the pieces of all ranks make up."""
    pieces: dict[str, list[Written]] = defaultdict(list)
    for each in written:
        pieces[each.key].append(each)
    return {key: StoredTensor(group[0].whole, group[0].dtype, tuple(each.stored for each in group))
            for key, group in pieces.items()}


@dataclass(frozen=True)
class Read:
    """A stored box, and the parts of it that pieces of this rank need."""

    stored: Stored
    parts: tuple[tuple[Piece, Box], ...]


def reads_of(pieces: Collection[Piece], index: Mapping[str, StoredTensor]) -> list[Read]:
    """The stored boxes that fill the pieces, each once. Fills what a padded tensor has more than the stored one with
    zeros.

    Raises:
        Misfit: a tensor is missing, of another shape or of another type.
    """
    parts: dict[Stored, list[tuple[Piece, Box]]] = defaultdict(list)
    for piece in pieces:
        tensor = index.get(piece.key)
        if tensor is None:
            raise Misfit(f"{piece.key} is missing")
        if tensor.dtype != piece.data.dtype or tensor.shape[1:] != piece.whole[1:] or (
                tensor.shape != piece.whole and not piece.padded):
            raise Misfit(f"{piece.key} has shape {tensor.shape} and type {tensor.dtype}, not {piece.whole} and "
                         f"{piece.data.dtype}")
        found = [(stored, shared) for stored in tensor.boxes if (shared := common(stored.box, piece.box))]
        there = common(piece.box, ((0,) * len(tensor.shape), tensor.shape))
        if sum(prod(shape) for _, (_, shape) in found) != (prod(there[1]) if there else 0):
            raise Misfit(f"a part of {piece.key} is missing")
        if there != piece.box:
            piece.data.zero_()
        for stored, shared in found:
            parts[stored].append((piece, shared))
    return [Read(stored, tuple(needed)) for stored, needed in parts.items()]


def read(reads: Iterable[Read], folder: Path, moved: Moved) -> None:
    """Fill the pieces.

    Raises:
        OSError: the file system refused.
        RuntimeError: a file does not hold what the index says.
    """
    files: dict[str, list[Read]] = defaultdict(list)
    for each in sorted(reads, key=lambda each: each.stored.offset):
        files[each.stored.file].append(each)
    with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        tasks = [pool.submit(_read_file, folder / name, each, moved) for name, each in files.items()]
    for task in tasks:
        task.result()


def _read_file(path: Path, reads: Sequence[Read], moved: Moved) -> None:
    with path.open("rb") as file:
        for each in reads:
            start, shape = each.stored.box
            tensor = torch.load(io.BytesIO(_bytes_at(file, each.stored)), map_location="cpu", weights_only=True)
            if tuple(tensor.shape) != shape:
                raise RuntimeError(f"{path.name} has a tensor of shape {tuple(tensor.shape)} at {each.stored.offset}, "
                                   f"the index says {shape}")
            for piece, shared in each.parts:
                piece.data[_slices(shared, piece.box[0])].copy_(tensor[_slices(shared, start)])
                moved(piece.data.element_size() * prod(shared[1]))


def _bytes_at(file: BinaryIO, stored: Stored) -> bytes:
    file.seek(stored.offset)
    raw = file.read(stored.nbytes)
    if len(raw) < stored.nbytes:
        raise RuntimeError(f"{stored.file} ends before byte {stored.offset + stored.nbytes:,}")
    return raw


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The box as an index into a tensor that begins at `origin`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(*box, origin, strict=True))
