"""Checkpoints of a training run in Megatron's distributed format (torch_dist), independent of the parallel layout.

Tensors (weights, fp32 master weights, Adam's moments) are stored as slices of whole tensors under layout-free keys, so
any TP, PP, VPP, CP and DP can read them (`checkpoint_tensors`). Everything else is JSON (`state.json`) or plain tensors
(`rng.safetensors`). `layouts.step_folder` makes a folder visible only when it is complete.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import CheckpointingException
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint.api import CheckpointException

from launch.errors import UserError
from launch.plan.plan import RankCoordinates
from megatron_rl.data import carried
from megatron_rl.layouts import step_folder as files
from megatron_rl.trainer import checkpoint_tensors, rng
from megatron_rl.trainer.optimizer import PolicyOptimizer

STATE, RNG = "state.json", "rng.safetensors"
FORMAT = 2


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint restored besides weights, moments and random states."""

    state: dict[str, Any]
    """`state.json` as given to `save_checkpoint`."""
    rng_restored: bool
    """False if the layout has changed, because random states belong to ranks that no longer exist."""


def save_checkpoint(folder: Path, chunks: list[torch.nn.Module], optimizer: PolicyOptimizer,
                    coordinates: RankCoordinates, layout: dict[str, int], state: dict[str, Any], keep: int,
                    rollouts: bytes = b"") -> int:
    """Write a checkpoint. Every training rank calls this at the same step.

    Args:
        folder: its final path, `checkpoints/step-000050`, on a file system that all ranks see.
        chunks: the bare model chunks of this rank.
        layout: the parallel sizes, which the random states belong to.
        state: everything that is not a tensor, as JSON. `state["model"]` is compared when it is read back.
        keep: number of complete checkpoints to keep once this one is complete.
        rollouts: content of `rollouts.npz` (`megatron_rl.data.carried`); the first rank's counts. Empty: no such file.

    Returns:
        Bytes on disk.

    Raises:
        UserError: on every rank, if the disk is full or a rank cannot write. The partial folder is removed, and
            earlier checkpoints are unchanged.
    """
    first = dist.get_rank() == 0
    text = json.dumps({"format": FORMAT, **state, "updates": optimizer.updates, "layout": layout,
                       "skipped_in_a_row": optimizer.skipped_in_a_row}, indent=2, allow_nan=False)
    with _together(folder):
        partial = files.begin(folder) if first else files.partial_of(folder)
    own, own_bytes = checkpoint_tensors.prepared_for_writing(
        checkpoint_tensors.sharded_tensors(chunks, optimizer, loading=False))
    random_states = safetensors_bytes(_random_states_of_all_ranks(coordinates))
    needed = _sum(own_bytes) + len(random_states) + len(text) + len(rollouts)
    size = 0
    try:
        with _together(folder, needed):
            if first:
                files.refuse_too_small(partial, needed)
        with _together(folder, needed):
            checkpoint_tensors.write(own, partial)
        with _together(folder, needed):
            if first:
                checkpoint_tensors.write_markers(partial)
                files.write_durably(partial / RNG, random_states)
                files.write_durably(partial / STATE, text.encode())
                if rollouts:
                    files.write_durably(partial / carried.FILE, rollouts)
                size = files.publish(folder, {"format": FORMAT, "step": files.step_of(folder)})
    except Exception:
        if first:
            files.discard(folder)
        raise
    with _together(folder):
        if first:
            files.remove_old(folder.parent, keep)
    return _sum(size)


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a complete checkpoint. Reads no pickle and needs no process group.

    Raises:
        UserError: the checkpoint is incomplete, of another format, or could have been written by another user.
    """
    if problem := files.incomplete_because(folder):
        raise UserError(f"the checkpoint is not complete: {problem}", where=str(folder),
                        fix="use an older one, or start a new run")
    files.refuse_foreign(folder)
    state = json.loads((folder / STATE).read_text())
    if state.get("format") != FORMAT:
        raise UserError(f"the checkpoint has format {state.get('format')}, this version reads {FORMAT}",
                        where=str(folder / STATE), fix="use the version of megatron-rl that wrote it")
    return state


def load_checkpoint(folder: Path, chunks: list[torch.nn.Module], optimizer: PolicyOptimizer,
                    coordinates: RankCoordinates, layout: dict[str, int], model: dict[str, Any]) -> Loaded:
    """Read a checkpoint into the model and the optimizer. Every training rank calls this.

    Weights, master weights, Adam's moments and step, and the position of the schedule carry over to any layout. Random
    states carry over only to an equal layout.

    Args:
        model: must equal `state["model"]`.

    Raises:
        UserError: on every rank. The checkpoint is incomplete, not this user's, or of another model, or its tensors do
            not exactly match this model and optimizer. One without optimizer state is refused, never half loaded.
    """
    shared: list[dict[str, Any]] = [{}]
    with _together(folder):
        if dist.get_rank() == 0:
            shared = [read_state(folder)]
            _refuse_other_model(folder, shared[0]["model"], model)
            checkpoint_tensors.refuse_unknown_classes(folder)
    dist.broadcast_object_list(shared)
    (state,) = shared
    with _together(folder):
        checkpoint_tensors.read(folder, chunks, optimizer, state["updates"])
        same_layout = state["layout"] == layout
        if same_layout:
            rng.restore(_random_states_of(folder, coordinates))
    optimizer.updates, optimizer.skipped_in_a_row = state["updates"], state["skipped_in_a_row"]
    return Loaded(state, same_layout)


def _refuse_other_model(folder: Path, saved: dict[str, Any], model: dict[str, Any]) -> None:
    saved, model = _flat(saved), _flat(model)
    different = [f"{name} was {saved.get(name)}, is {model.get(name)}" for name in files.unlike(saved, model)]
    if different:
        raise UserError(f"the checkpoint is of another model or precision: {'; '.join(different)}", where=str(folder),
                        fix="continue with the settings it was written with, or start a new run")


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    return {key: value for name, part in nested.items()
            for key, value in (part.items() if isinstance(part, dict) else [(name, part)])}


@contextmanager
def _together(folder: Path, needed: int | None = None) -> Iterator[None]:
    """Run a block on all ranks. If it fails on one, all ranks raise, and none keeps waiting in a collective.

    Failures that the user can fix become UserErrors. The other ranks raise the first failing rank's message.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:    # torch's CheckpointException is not an Exception
        failure = error
    told: list[UserError | str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failure is None else _told(failure, folder, needed))
    for message in told:
        if isinstance(message, UserError):
            raise message from failure
    for rank, message in enumerate(told):
        if message is not None:
            raise RuntimeError(f"checkpoint {folder}: rank {rank} failed: {message}") from failure


def _told(error: BaseException, folder: Path, needed: int | None) -> UserError | str:
    if isinstance(error, UserError):
        return error
    if needed is not None and files.is_disk_full(error):
        return files.disk_full(files.partial_of(folder), needed)
    if isinstance(error, OSError):
        return UserError(f"the checkpoint cannot be written or read: {error}", where=str(folder),
                         fix="check permissions and the state of the file system")
    if isinstance(error, CheckpointingException):
        return UserError(f"the checkpoint does not fit this run's model and optimizer: {error}", where=str(folder),
                         fix="use the model.path, trainer.dtype and trainer.distributed_optimizer that it was "
                             "written with")
    return f"{type(error).__name__}: {error}"


def _random_states_of_all_ranks(coordinates: RankCoordinates) -> dict[str, torch.Tensor]:
    """Every rank's random states under its coordinates, on the first rank; {} on the others."""
    first = dist.get_rank() == 0
    gathered: list[tuple[str, dict[str, torch.Tensor]]] | None = [("", {})] * dist.get_world_size() if first else None
    dist.gather_object((_prefix(coordinates), rng.capture()), gathered)
    return {prefix + name: state for prefix, states in gathered or () for name, state in states.items()}


def _random_states_of(folder: Path, coordinates: RankCoordinates) -> dict[str, torch.Tensor]:
    prefix = _prefix(coordinates)
    with safe_open(folder / RNG, framework="pt") as file:
        return {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}


def _prefix(coordinates: RankCoordinates) -> str:
    return f"tp{coordinates.tp}.cp{coordinates.cp}.dp{coordinates.dp}.pp{coordinates.pp}/"


def _sum(value: int) -> int:
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return sum(values)
