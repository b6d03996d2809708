"""The index of a checkpoint (`.metadata` of torch's distributed checkpoint): which box of which tensor is where.

Torch stores it as a pickle. It is read with an unpickler that only knows data classes, by the first rank alone.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from launch.errors import UserError
from megatron_rl.layouts.boxes import Box, box_text, first_overlap
from megatron_rl.layouts.step_folder import write_durably

FILE = ".metadata"

# Everything that torch's distributed checkpoint puts into `.metadata`. None of it runs code when constructed, and what
# a forged file may set on these classes, or call with its values, is again one of them, or data.
_KNOWN = {
    "torch": {"Size", "float32", "bfloat16"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},    # Python 3.13
}


@dataclass(frozen=True)
class Stored:
    """A box of a tensor in a file of the checkpoint, as `torch.save` writes it."""

    box: Box
    file: str
    offset: int
    nbytes: int
    """Bytes in the file, with the frame of `torch.save`."""


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of the checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Stored, ...]


def write_index(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write `.metadata`, synced, and the two small files that Megatron's own loader requires: `metadata.json` and an
    empty `common.pt`.

    Raises:
        RuntimeError: an element of a tensor is in no box, or in two.
    """
    for key, tensor in tensors.items():
        _check_complete(key, tensor)
    content = Metadata(
        state_dict_metadata={key: TensorStorageMetadata(
            TensorProperties(tensor.dtype), torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(start), torch.Size(shape)) for start, shape in
             (stored.box for stored in tensor.boxes)]) for key, tensor in tensors.items()},
        storage_data={MetadataIndex(key, torch.Size(stored.box[0]), at):
                      _StorageInfo(stored.file, stored.offset, stored.nbytes)
                      for key, tensor in tensors.items() for at, stored in enumerate(tensor.boxes)},
        storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    write_durably(folder / FILE, pickle.dumps(content))
    TorchCommonSaveStrategy("torch", 1).save_common({}, folder)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _check_complete(key: str, tensor: StoredTensor) -> None:
    boxes = [stored.box for stored in tensor.boxes]
    if shared := first_overlap(boxes):
        raise RuntimeError(f"{key}: two ranks wrote {box_text(shared)}")
    missing = prod(tensor.shape) - sum(prod(shape) for _, shape in boxes)
    if missing:
        raise RuntimeError(f"{key}: no rank wrote {missing:,} of {prod(tensor.shape):,} elements")


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by their keys.

    Raises:
        UserError: `.metadata` names any class other than those that torch's distributed checkpoint writes, or is no
            such index.
    """
    raw = (folder / FILE).read_bytes()
    try:
        content = _KnownClassesOnly(io.BytesIO(raw)).load()
        boxes: dict[str, list[Stored]] = defaultdict(list)
        shapes = {(key, tuple(chunk.offsets)): tuple(chunk.sizes)
                  for key, tensor in content.state_dict_metadata.items() for chunk in tensor.chunks}
        for index, place in content.storage_data.items():
            start = tuple(index.offset)
            boxes[index.fqn].append(Stored((start, shapes[index.fqn, start]), _plain(place.relative_path), place.offset,
                                           place.length))
        return {key: StoredTensor(tuple(tensor.size), tensor.properties.dtype, tuple(boxes[key]))
                for key, tensor in content.state_dict_metadata.items()}
    except (pickle.UnpicklingError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint's index was not written by this program: {error}",
                        where=str(folder / FILE), fix="do not use this checkpoint") from error


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"it names {name!r}, a file outside the checkpoint")
    return name


class _KnownClassesOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


# Copied before any file is read: a pickle can change the class, and with it the list of its members.
_MEMORY_FORMATS = dict(_MEM_FORMAT_ENCODING.__members__)


def _enum_member(owner: Any, name: Any) -> Enum:
    """Python 3.11 before 3.11.4 pickles an enum member as getattr(its class, its name). Allow this only for the one
    enum in an index."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEMORY_FORMATS:
        raise pickle.UnpicklingError("it names builtins.getattr")
    return _MEMORY_FORMATS[name]
