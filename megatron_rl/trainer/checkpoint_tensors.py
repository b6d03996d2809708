"""The tensors of a checkpoint: their sharded state dicts, and how they are written and read back.

Each rank writes one file from its own process. Megatron's stock writer forks processes and starts a manager, which must
not happen inside an actor that holds threads, sockets and a GPU. Python objects (`_extra_state` of Transformer Engine
modules, optimizer hyperparameters) are left out, because they would have to be pickled.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing import load as megatron_load
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from launch.errors import UserError
from megatron_rl.trainer.optimizer import PolicyOptimizer

METADATA = ".metadata"

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


def sharded_tensors(chunks: list[MegatronModule], optimizer: PolicyOptimizer, *, loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dict of the model chunks and the optimizer, tensors only.

    With the distributed optimizer, this gathers fp32 master weights and moments on the first rank of each DP x CP group
    in host memory, one buffer at a time: 12 bytes per parameter of the model shard. Collective.
    """
    model = {name: chunk.sharded_state_dict(metadata=_metadata()) for name, chunk in _named(chunks).items()}
    model, _ = extract_sharded_tensors_and_factories(model)
    moments = optimizer.megatron.sharded_state_dict(
        model if len(chunks) > 1 else model["model"], is_loading=loading, metadata=_metadata())
    moments, _ = extract_sharded_tensors_and_factories(moments)
    return {**model, "optimizer": moments}


def prepared_for_writing(tensors: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The part of `sharded_tensors` that this rank must write, and its size in bytes. Checks over all ranks that every
    element is written exactly once. Collective."""
    prepared, _ = save_preprocess(tensors)
    own: dict[str, list[ShardedTensor]] = {}
    for tensor in nested_values(prepared):
        if is_main_replica(tensor.replica_id):
            own.setdefault(tensor.key, []).append(tensor)
    return own, sum(t.data.numel() * t.data.element_size() for shards in own.values() for t in shards)


def write(own: dict[str, list[ShardedTensor]], folder: Path) -> None:
    """Write this rank's tensors into `folder`, synced. The first rank adds the index (`.metadata`). Collective.

    Raises:
        OSError: on a rank that could not write.
        CheckpointException: on all other ranks.
    """
    disk = _Disk()
    writer = torch_checkpoint.FileSystemWriter(folder, sync_files=True, thread_count=1)
    writer.fs = disk
    try:
        torch_checkpoint.save(mcore_to_pyt_state_dict(own), storage_writer=writer,
                              planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False))
    except CheckpointException as error:
        if disk.error is not None:
            raise disk.error from error
        raise


class _Disk(FileSystem):
    """Remembers why a write failed: torch.save turns a full disk into `RuntimeError: unexpected pos 704 vs 598`."""

    error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        disk = self

        class Stream(io.BufferedWriter):
            def write(self, data: Any) -> int:
                try:
                    return super().write(data)
                except OSError as error:
                    disk.error = disk.error or error
                    raise

        try:
            with Stream(io.FileIO(path, mode)) as stream:
                yield stream
        except OSError as error:
            self.error = self.error or error
            raise


def write_markers(folder: Path) -> None:
    """Write the two small files that Megatron's own loader requires: `metadata.json` and an empty `common.pt`."""
    TorchCommonSaveStrategy("torch", 1).save_common({}, folder)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def read(folder: Path, chunks: list[MegatronModule], optimizer: PolicyOptimizer, updates: int) -> None:
    """Fill the model, the master weights and Adam's state from `folder`. Collective.

    Raises:
        CheckpointingException: a tensor is missing, unexpected, or of another shape.
    """
    loaded = megatron_load(sharded_tensors(chunks, optimizer, loading=True), str(folder),
                           strict=StrictHandling.RAISE_ALL)
    for name, chunk in _named(chunks).items():
        missing, unexpected = chunk.load_state_dict(loaded[name], strict=False)
        missing = [key for key in missing if not key.endswith("_extra_state")]
        if missing or unexpected:
            raise RuntimeError(f"model and checkpoint do not match: missing {missing}, unexpected {unexpected}")
    _load_optimizer(optimizer, loaded["optimizer"], updates)


def refuse_unknown_classes(folder: Path) -> None:
    """Refuse a `.metadata` that names any class other than those that torch's distributed checkpoint writes.

    Torch loads this file with an unrestricted unpickler. Reading it first with one that only knows data classes turns a
    forged file into an error.
    """
    with (folder / METADATA).open("rb") as file:
        try:
            _KnownClassesOnly(file).load()
        except pickle.UnpicklingError as error:
            raise UserError(f"the checkpoint's index was not written by this program: {error}",
                            where=str(folder / METADATA), fix="do not use this checkpoint") from error


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


def _named(chunks: list[MegatronModule]) -> dict[str, MegatronModule]:
    """The chunks by their names in Megatron's sharded state dict."""
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{i}": chunk for i, chunk in enumerate(chunks)}


def _metadata() -> dict[str, Any]:
    # The only layout-free format of the distributed optimizer in megatron-core 0.16. Gathering over gloo keeps the
    # gathered buffers out of GPU memory.
    return {"distrib_optim_sharding_type": "fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient": True,
            "chained_optim_avoid_prefix": True}


def _load_optimizer(optimizer: PolicyOptimizer, tensors: dict[str, Any], step: int) -> None:
    """Hyperparameters come from the run's config, where they may have been changed on purpose; state from the file."""
    (part,) = optimizer.parts
    if isinstance(part, DistributedOptimizer):
        _load_distributed(part, tensors["param_state"], step)
        return
    plain = part.state_dict()
    adam = plain.get("optimizer", plain)
    stored = tensors.get("optimizer", tensors)
    adam["state"] = {**stored["state"], "common_step": torch.tensor(float(step))}
    if "fp32_from_fp16_params" in plain:
        plain["fp32_from_fp16_params"] = tensors["fp32_from_fp16_params"]
    part.load_state_dict(plain)


def _load_distributed(part: DistributedOptimizer, moments: dict[str, Any], step: int) -> None:
    # With torch's own Adam (no Transformer Engine), Megatron 0.16 gives all parameters one shared `step` tensor, which
    # then counts once per parameter, and fails on the key itself when it copies the moments. So `step` is set here,
    # after the moments.
    plain = part.state_dict()
    for group in plain["optimizer"]["param_groups"]:
        group["step"] = step
    part.load_state_dict(plain)
    states = list(part.optimizer.state.values())
    counted = [state.pop("step", None) is not None for state in states]
    part.load_parameter_state_from_fully_reshardable(moments)
    for state in (state for state, has_step in zip(states, counted, strict=True) if has_step):
        state["step"] = torch.tensor(float(step))
