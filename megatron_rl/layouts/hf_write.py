"""Exporting to a Hugging Face folder through the layouts. Every rank writes the tiles it owns, in place.

The files are standard safetensors. Every rank computes their byte offsets itself, so nothing is gathered and no tensor
is ever whole in memory. There are three steps, and the caller adds barriers between them (`disk.VersionsOnDisk`):

    exporter = Exporter(folder, canonical_tensors(architecture), torch.bfloat16)
    exporter.prepare(model_folder, architecture)            # one rank: files at full size, config and tokenizer
    exporter.write(layouts, parameters, owned_tiles(...))   # every rank: returns digests of what it holds
    exporter.read_back(rank, world)                         # every rank: returns digests of what the files hold

All files are in a hidden folder next to the final one until `step_folder.publish` renames it. All writing ranks must
see this folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts import step_folder
from megatron_rl.layouts.digest import add, digest_tiles
from megatron_rl.layouts.disk_check import digests_of_files
from megatron_rl.layouts.hf_read import INDEX_FILE, SINGLE_FILE, check_parameters
from megatron_rl.layouts.megatron import Implementation, megatron_layout
from megatron_rl.layouts.step_folder import Exported, Part
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile, contiguous_stride, tile_view

_SAFETENSORS_DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")

Digests = dict[str, int]
"""Canonical tensor -> digest (`layouts.digest`) of all or some of its elements. Digests of parts add up."""


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file of the export: its name, its header, and the offset of each tensor's bytes."""

    name: str
    header: bytes
    offsets: dict[str, int]
    size: int


def in_groups(canonical: Sequence[CanonicalTensor], dtype: torch.dtype, max_bytes: int) -> list[list[CanonicalTensor]]:
    """Whole tensors in order, in groups of at most `max_bytes`. A larger tensor gets its own group."""
    groups: list[list[CanonicalTensor]] = []
    room = 0
    for tensor in canonical:
        size = prod(tensor.shape) * dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= size
    return groups


def shard_files(canonical: Sequence[CanonicalTensor], dtype: torch.dtype, max_bytes: int) -> list[ShardFile]:
    """The files of an export, with at most `max_bytes` of data each. A larger tensor gets its own file."""
    groups = in_groups(canonical, dtype, max_bytes)
    if len(groups) == 1:
        return [_shard_file(SINGLE_FILE, groups[0], dtype)]
    return [_shard_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group, dtype)
            for i, group in enumerate(groups, start=1)]


def _shard_file(name: str, tensors: Iterable[CanonicalTensor], dtype: torch.dtype) -> ShardFile:
    """The safetensors format: 8 bytes of header length, a JSON header padded with spaces to 8 bytes, then the data."""
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


def owned_tiles(layouts_of_rank: Mapping[int, Iterable[ParamLayout]], rank: int, replica: int = 0,
                replicas: int = 1) -> dict[str, list[int]]:
    """The tiles that a rank writes: parameter name -> indices of its tiles. Every box has one owner.

    A box that several ranks hold (norms under TP, the second copy of tied embeddings) belongs to the first holder in
    the order of rank, then parameter. Replicas share the tensors of their shard, the largest first. One replica writes
    a whole tensor, so the slices of columns that interleave in its file come from one TP group, in most layouts from
    one node, and two clients of the file system do not compete for a page.

    Args:
        layouts_of_rank: layouts of the ranks of one replica (DP = CP = 0).
        rank: the rank of that replica with the same shard.
        replica: which of the `replicas` (DP x CP) copies the writing rank belongs to.
    """
    taken: set[tuple] = set()
    first: dict[str, int] = {}
    elements: Counter[str] = Counter()
    mine: list[tuple[str, str, int]] = []
    for holder in sorted(layouts_of_rank):
        for layout in layouts_of_rank[holder]:
            for index, tile in enumerate(layout.tiles):
                key = (tile.tensor, tile.box)
                if key not in taken:
                    first.setdefault(tile.tensor, holder)
                    elements[tile.tensor] += tile.numel
                    if holder == rank:
                        mine.append((tile.tensor, layout.name, index))
                taken.add(key)
    load: Counter[tuple[int, int]] = Counter()
    writer: dict[str, int] = {}
    for tensor in sorted(elements, key=lambda tensor: (-elements[tensor], tensor)):
        writer[tensor] = min(range(replicas), key=lambda each: load[first[tensor], each])
        load[first[tensor], writer[tensor]] += elements[tensor]
    owned: defaultdict[str, list[int]] = defaultdict(list)
    for tensor, parameter, index in mine:
        if writer[tensor] == replica:
            owned[parameter].append(index)
    return dict(owned)


class Exporter:
    """One export. Construct it with equal arguments on every rank; the module's docstring explains the three steps."""

    def __init__(self, folder: str | Path, canonical: Sequence[CanonicalTensor], dtype: torch.dtype,
                 max_shard_bytes: int = 5 * 10**9) -> None:
        if dtype not in _SAFETENSORS_DTYPE:
            raise ValueError(f"cannot export as {dtype}: one of {list(_SAFETENSORS_DTYPE)}")
        self.folder = Path(folder)
        self.partial = step_folder.partial_of(self.folder)
        self.dtype = dtype
        self.shapes = {tensor.name: tensor.shape for tensor in canonical}
        self.files = shard_files(canonical, dtype, max_shard_bytes)
        self._file_of = {name: file for file in self.files for name in file.offsets}

    def prepare(self, model_folder: str | Path, architecture: Architecture) -> None:
        """On one rank: create the files with their headers at full size, and copy config, tokenizer and chat template.

        The files are sparse: on NFS and older Lustre the C library would reserve space by writing to every block.

        Raises UserError if the folder already exists or the disk has too little room.
        """
        if self.folder.exists():
            raise UserError(f"{self.folder} already exists", fix="export to another folder, or remove it")
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        needed, free = sum(file.size for file in self.files), shutil.disk_usage(self.partial).free
        if free < needed:
            raise UserError(f"no room for the weights: they need {needed:,} bytes, {free:,} are free",
                            where=str(self.folder), fix="free space, or move the run with run.dir")
        for source in sorted(Path(model_folder).iterdir()):
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copyfile(source, self.partial / source.name)
        self._adapt_config(architecture)
        for file in self.files:
            with open(self.partial / file.name, "wb") as stream:
                stream.write(file.header)
                stream.truncate(file.size)
        if len(self.files) > 1:
            index = {"metadata": {"total_size": sum(prod(s) for s in self.shapes.values()) * self.dtype.itemsize},
                     "weight_map": {name: file.name for name, file in self._file_of.items()}}
            (self.partial / INDEX_FILE).write_text(json.dumps(index, indent=2))

    def write(self, layouts: Iterable[ParamLayout], parameters: Mapping[str, Tensor],
              owned: Mapping[str, Sequence[int]]) -> Digests:
        """On every rank: write the tiles that `owned_tiles` gives it, converted to the export's dtype, and sync them to
        disk. Returns their digests as this rank holds them.

        It uses pwrite, not a shared mapping: on NFS, two hosts that write to one mapped page lose bytes.

        Raises OSError: no space, quota exceeded, or another fault of the file system.
        """
        layouts = list(layouts)
        check_parameters(layouts, parameters)
        descriptors: dict[str, int] = {}
        digests: Digests = {}
        try:
            for layout in layouts:
                if layout.name not in owned:
                    continue
                parameter = parameters[layout.name].detach().to(self.dtype)
                for index in owned[layout.name]:
                    tile = layout.tiles[index]
                    file = self._file_of[tile.tensor]
                    if file.name not in descriptors:
                        descriptors[file.name] = os.open(self.partial / file.name, os.O_WRONLY)
                    digests[tile.tensor] = add(digests.get(tile.tensor, 0), digest_tiles(parameter, (tile,)))
                    values = tile_view(parameter, tile).cpu().contiguous()
                    self._write_tile(descriptors[file.name], file.offsets[tile.tensor], tile, values)
            for descriptor in descriptors.values():
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return digests

    def read_back(self, rank: int, world: int) -> Digests:
        """On every rank, after all have written: digests of this rank's share of the tensors, read whole and by name as
        a reader would. The shares together cover all tensors, and differ from the shares that were written.
        """
        load = [0] * world
        mine = []
        for name in sorted(self.shapes, key=lambda name: (-prod(self.shapes[name]), name)):
            reader = load.index(min(load))
            load[reader] += prod(self.shapes[name])
            if reader == rank:
                mine.append(name)
        return digests_of_files(self.partial, mine)

    def _write_tile(self, descriptor: int, begin: int, tile: Tile, values: Tensor) -> None:
        """Write the box as runs that are contiguous in the canonical tensor."""
        shape, item = self.shapes[tile.tensor], self.dtype.itemsize
        run_dims = len(shape)
        while run_dims > 1 and tile.shape[run_dims - 1] == shape[run_dims - 1]:
            run_dims -= 1
        # Dimensions from run_dims-1 on form one run, because the later ones are whole.
        run = prod(tile.shape[run_dims - 1:]) * item
        data = values.view(torch.uint8).flatten().numpy().data
        strides = contiguous_stride(shape)
        first = begin + sum(a * s for a, s in zip(tile.start, strides, strict=True)) * item
        starts = [0]
        for extent, stride in zip(tile.shape[:run_dims - 1], strides[:run_dims - 1], strict=True):
            starts = [base + i * stride * item for base in starts for i in range(extent)]
        for number, start in enumerate(starts):
            _pwrite(descriptor, data[number * run:(number + 1) * run], first + start)

    def _adapt_config(self, architecture: Architecture) -> None:
        path = self.partial / "config.json"
        config = json.loads(path.read_text())
        config["tie_word_embeddings"] = architecture.tied
        config.pop("torch_dtype", None)
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def export_part(exporter: Exporter, part: Part, model_folder: str | Path, architecture: Architecture,
                training: TrainingPlan, rank: int, implementation: Implementation,
                parameters: Mapping[str, Tensor]) -> Exported:
    """Carry out one part of an export on a training rank, for `disk.write_folder`. Errors of the file system are
    returned in the answer, not raised.

    Args:
        model_folder: source of config, tokenizer and chat template.
        parameters: the rank's live parameters, by the names in its `megatron_layout`.
    """
    try:
        if part == "prepare":
            exporter.prepare(model_folder, architecture)
            return Exported({})
        if part == "read_back":
            return Exported(exporter.read_back(rank, training.world_size))
        me = training.ranks[rank]
        first = {each.rank: each for each in training.ranks if each.dp == 0 and each.cp == 0}
        layouts = {peer: megatron_layout(architecture, training, peer, implementation) for peer in first}
        mine = next(peer for peer, each in first.items() if (each.tp, each.pp) == (me.tp, me.pp))
        owned = owned_tiles(layouts, mine, me.dp * training.cp + me.cp, training.dp * training.cp)
        return Exported(exporter.write(layouts[mine], parameters, owned))
    except (OSError, UserError) as error:
        return Exported({}, error.what if isinstance(error, UserError) else str(error))


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done
