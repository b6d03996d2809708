"""Exporting to a Hugging Face folder through the layouts: every rank writes the tiles it owns, in place.

The files are standard safetensors whose byte offsets every rank computes for itself, so nothing is gathered and no
tensor is ever whole in memory. Three steps, with a barrier of the caller's between them:

    exporter = Exporter(folder, canonical_tensors(architecture), torch.bfloat16)
    if rank == 0: exporter.prepare(model_folder, architecture)      # files at full size, config and tokenizer
    barrier()
    exporter.write(layouts, parameters, owned_tiles(layouts_of_rank, rank))
    barrier()
    if rank == 0: exporter.finish()                                  # the folder appears under its name

The folder must be seen by all writing ranks.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from launch.errors import UserError
from launch.planner.plan import Architecture
from megatron_rl.weight_sync.hf_io import INDEX_FILE, SINGLE_FILE, check_parameters
from megatron_rl.weight_sync.tiles import CanonicalTensor, ParamLayout, Tile, contiguous_stride, tile_view

_SAFETENSORS_DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file of the export: its name, its header, and where each tensor's bytes begin."""

    name: str
    header: bytes
    offsets: dict[str, int]
    size: int


def shard_files(canonical: Sequence[CanonicalTensor], dtype: torch.dtype, max_bytes: int) -> list[ShardFile]:
    """Pack tensors, in order, into files of at most `max_bytes` of data (a larger tensor gets a file of its own)."""
    groups: list[list[CanonicalTensor]] = []
    room = 0
    for tensor in canonical:
        size = prod(tensor.shape) * dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= size
    if len(groups) == 1:
        return [_shard_file(SINGLE_FILE, groups[0], dtype)]
    return [_shard_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group, dtype)
            for i, group in enumerate(groups, start=1)]


def _shard_file(name: str, tensors: Iterable[CanonicalTensor], dtype: torch.dtype) -> ShardFile:
    """safetensors: 8 bytes of header length, a JSON header padded with spaces to 8 bytes, then the data."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    begin, begins = 0, {}
    for tensor in tensors:
        end = begin + prod(tensor.shape) * dtype.itemsize
        entries[tensor.name] = {"dtype": _SAFETENSORS_DTYPE[dtype], "shape": list(tensor.shape),
                                "data_offsets": [begin, end]}
        begins[tensor.name], begin = begin, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return ShardFile(name, header, {tensor: len(header) + at for tensor, at in begins.items()}, len(header) + begin)


def owned_tiles(layouts_of_rank: Mapping[int, Iterable[ParamLayout]], rank: int) -> dict[str, list[int]]:
    """Which tiles `rank` writes: parameter name -> indices of its tiles.

    A box that several ranks hold (norms under TP, the second copy of tied embeddings) belongs to the first holder
    in the order of rank, then parameter. Pass the layouts of one replica (DP = CP = 0); other ranks own nothing.
    """
    taken: set[tuple] = set()
    owned: dict[str, list[int]] = {}
    for holder in sorted(layouts_of_rank):
        for layout in layouts_of_rank[holder]:
            for index, tile in enumerate(layout.tiles):
                key = (tile.tensor, tile.box)
                if key not in taken and holder == rank:
                    owned.setdefault(layout.name, []).append(index)
                taken.add(key)
    return owned


class Exporter:
    """One export. Construct it alike on every rank; see the module's docstring for the three steps.

    Until `finish`, everything lies in `<folder>.partial`: a folder under its final name is complete.
    """

    def __init__(self, folder: str | Path, canonical: Sequence[CanonicalTensor], dtype: torch.dtype,
                 max_shard_bytes: int = 5 * 10**9) -> None:
        if dtype not in _SAFETENSORS_DTYPE:
            raise ValueError(f"cannot export as {dtype}: one of {list(_SAFETENSORS_DTYPE)}")
        self.folder = Path(folder)
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.dtype = dtype
        self.shapes = {tensor.name: tensor.shape for tensor in canonical}
        self.files = shard_files(canonical, dtype, max_shard_bytes)
        self._file_of = {name: file for file in self.files for name in file.offsets}

    def prepare(self, model_folder: str | Path, architecture: Architecture) -> None:
        """On one rank: reserve the files at full size, copy config, tokenizer and chat template.

        Raises UserError if the folder exists already or the disk has too little room.
        """
        if self.folder.exists():
            raise UserError(f"{self.folder} exists already", fix="export to another folder, or remove it")
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        for source in sorted(Path(model_folder).iterdir()):
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(source, self.partial / source.name)
        self._adapt_config(architecture)
        for file in self.files:
            self._reserve(file)
        if len(self.files) > 1:
            index = {"metadata": {"total_size": sum(prod(s) for s in self.shapes.values()) * self.dtype.itemsize},
                     "weight_map": {name: file.name for name, file in self._file_of.items()}}
            (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2))

    def write(self, layouts: Iterable[ParamLayout], parameters: Mapping[str, Tensor],
              owned: Mapping[str, Sequence[int]]) -> int:
        """On every rank: write the tiles that `owned_tiles` gives it, converted to the export's dtype; bytes written.

        pwrite, not a shared mapping: on NFS two hosts that dirty the same page through mappings lose bytes.
        """
        layouts = list(layouts)
        check_parameters(layouts, parameters)
        descriptors: dict[str, int] = {}
        written = 0
        try:
            for layout in layouts:
                for index in owned.get(layout.name, ()):
                    tile = layout.tiles[index]
                    file = self._file_of[tile.tensor]
                    if file.name not in descriptors:
                        descriptors[file.name] = os.open(self.partial / file.name, os.O_WRONLY)
                    values = tile_view(parameters[layout.name], tile).to(device="cpu", dtype=self.dtype).contiguous()
                    written += self._write_tile(descriptors[file.name], file.offsets[tile.tensor], tile, values)
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return written

    def finish(self) -> None:
        """On one rank, after all have written: give the folder its name."""
        for path in self.partial.iterdir():
            _fsync(path)
        _fsync(self.partial)
        self.partial.rename(self.folder)
        _fsync(self.folder.parent)

    def _write_tile(self, descriptor: int, begin: int, tile: Tile, values: Tensor) -> int:
        """Write the box as runs that are contiguous in the canonical tensor."""
        shape, item = self.shapes[tile.tensor], self.dtype.itemsize
        run_dims = len(shape)
        while run_dims > 1 and tile.shape[run_dims - 1] == shape[run_dims - 1]:
            run_dims -= 1
        # Dimensions run_dims-1 and later form one run: the later ones are whole.
        run = prod(tile.shape[run_dims - 1:]) * item
        data = memoryview(values.view(torch.uint8).flatten().numpy())
        strides = contiguous_stride(shape)
        first = begin + sum(a * s for a, s in zip(tile.start, strides)) * item
        starts = [0]
        for extent, stride in zip(tile.shape[:run_dims - 1], strides):
            starts = [base + i * stride * item for base in starts for i in range(extent)]
        for number, start in enumerate(starts):
            _pwrite(descriptor, data[number * run:(number + 1) * run], first + start)
        return len(data)

    def _adapt_config(self, architecture: Architecture) -> None:
        path = self.partial / "config.json"
        config = json.loads(path.read_text())
        config["tie_word_embeddings"] = architecture.tied_embeddings
        config.pop("torch_dtype", None)
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def _reserve(self, file: ShardFile) -> None:
        path = self.partial / file.name
        with open(path, "wb") as stream:
            stream.write(file.header)
            stream.flush()
            try:
                os.posix_fallocate(stream.fileno(), 0, file.size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise UserError(f"no room for {file.name} ({file.size / 1e9:.2f} GB)", where=str(self.folder),
                                fix="free space, or export elsewhere") from error


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
