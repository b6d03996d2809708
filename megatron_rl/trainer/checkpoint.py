"""Checkpoints of a training run in Megatron's distributed format (torch_dist), independent of the parallel layout.

Tensors (weights, fp32 master weights, Adam's moments) are stored as boxes of whole tensors under layout-free keys
(`checkpoint_pieces`), so any TP, PP, VPP, CP and DP can read them. Every rank writes and reads a share of its own
(`checkpoint_tensors`). Everything else is JSON (`state.json`) or plain tensors (`rng.safetensors`).
`layouts.step_folder` makes a folder visible only when it is complete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes

from launch.errors import UserError
from launch.plan.plan import RankCoordinates
from megatron_rl.data import carried
from megatron_rl.layouts import step_folder as files
from megatron_rl.trainer import checkpoint_tensors, rng
from megatron_rl.trainer.background import Transfer
from megatron_rl.trainer.checkpoint_index import StoredTensor, read_index, write_index
from megatron_rl.trainer.checkpoint_pieces import Piece, complete, pieces_of
from megatron_rl.trainer.optimizer import PolicyOptimizer

log = logging.getLogger(__name__)

STATE, RNG = "state.json", "rng.safetensors"
FORMAT = 2
APART = timedelta(hours=1)
"""How much longer than the first rank the last one may take to write or read its share. The hang watch, which sees
that no bytes move, is earlier where the run waits."""
ALIGNED = 64
"""Pieces begin at multiples of this in the copy on the host, in bytes."""


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint restored besides weights, moments and random states."""

    state: dict[str, Any]
    """`state.json` as given to `begin_save`."""
    rng_restored: bool
    """False if the layout has changed, because random states belong to ranks that no longer exist."""


class Checkpoints:
    """The saves and loads of one rank, one at a time. Each has a collective part on the caller's thread, and then a
    thread of its own, which talks to the other ranks over a process group of its own.

    Args:
        chunks: the bare model chunks of this rank.
        layout: the parallel sizes, which random states belong to.
        keep: number of complete checkpoints to keep once another one is complete.
    """

    def __init__(self, chunks: list[MegatronModule], optimizer: PolicyOptimizer, coordinates: RankCoordinates,
                 layout: dict[str, int], keep: int) -> None:
        self._chunks, self._optimizer, self._coordinates = chunks, optimizer, coordinates
        self._layout, self._keep = layout, keep
        self._first = dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=APART)
        self._transfer: Transfer[None] | None = None
        self._progress = files.Transferred(0, 0.0, True)
        """How far it is, or the latest one was."""
        self._loading: dict[str, Any] = {}
        """`state.json` of the checkpoint that is being loaded."""
        self._host: torch.Tensor | None = None
        """The copy of this rank's share that a background save writes: uint8, kept from one save to the next."""

    # ---- save --------------------------------------------------------------------------------------------------

    def begin_save(self, folder: Path, state: dict[str, Any], rollouts: bytes = b"", *, background: bool) -> None:
        """Begin to write a checkpoint. Every training rank calls this at the same step. An unfinished save is waited
        for.

        Args:
            folder: its final path, `checkpoints/step-000050`, on a file system that all ranks see.
            state: everything that is not a tensor, as JSON. `state["model"]` is compared when it is read back.
            rollouts: content of `rollouts.npz` (`megatron_rl.data.carried`); the first rank's counts. Empty: no file.
            background: write a copy in host memory, so that weights and moments may change at once. Otherwise they must
                not change until the save is finished.

        Raises:
            UserError: on every rank: there is no room, or the save before this one failed.
        """
        self.wait()
        text = json.dumps({"format": FORMAT, **state, "updates": self._optimizer.updates, "layout": self._layout,
                           "skipped_in_a_row": self._optimizer.skipped_in_a_row}, indent=2, allow_nan=False)
        pieces = [piece for piece in pieces_of(self._chunks, self._optimizer) if piece.written]
        others = {RNG: safetensors_bytes(self._random_states_of_all_ranks()), STATE: text.encode(),
                  **({carried.FILE: rollouts} if rollouts else {})}
        needed = sum(self._gathered(sum(piece.nbytes for piece in pieces))) + sum(map(len, others.values()))
        with self._together(folder):
            if self._first:
                files.begin(folder)
        with _discarding(folder if self._first else None), self._together(folder, needed):
            if self._first:
                files.refuse_too_small(files.partial_of(folder), needed)
            if background:
                pieces = self._on_host(pieces)
        _synchronise()
        self._transfer = Transfer(partial(self._write, folder, pieces, others, needed))

    def _write(self, folder: Path, pieces: Collection[Piece], others: Mapping[str, bytes], needed: int,
               moved: Callable[[int], None]) -> None:
        """Write this rank's pieces. When all ranks have, the first one adds the index and makes the folder visible.

        Raises:
            UserError: on every rank, if the disk is full or a rank cannot write. The partial folder is removed, and
                earlier checkpoints are unchanged.
        """
        to = files.partial_of(folder)
        with _discarding(folder if self._first else None):
            with self._together(folder, needed):
                own = checkpoint_tensors.write(pieces, to, self._coordinates.rank, moved)
            written = self._gathered(own)
            with self._together(folder, needed):
                if self._first:
                    write_index(to, checkpoint_tensors.together(each for part in written for each in part))
                    for name, content in others.items():
                        files.write_durably(to / name, content)
                    files.publish(folder, {"format": FORMAT, "step": files.step_of(folder)})
        with self._together(folder):
            if self._first:
                files.remove_old(folder.parent, self._keep)

    def _on_host(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces in host memory, which on a GPU is page-locked: it is filled at the rate of the bus."""
        starts, total = [], 0
        for piece in pieces:
            starts.append(total)
            total += -(-piece.nbytes // ALIGNED) * ALIGNED
        if self._host is None or self._host.numel() < total:
            self._host = None
            self._host = _page_locked(torch.empty(total, dtype=torch.uint8))
        copies = []
        for start, piece in zip(starts, pieces, strict=True):
            copy = self._host[start:start + piece.nbytes].view(piece.data.dtype).view(piece.data.shape)
            copies.append(replace(piece, data=copy.copy_(piece.data, non_blocking=True)))
        return copies

    def _random_states_of_all_ranks(self) -> dict[str, torch.Tensor]:
        """Every rank's random states under its coordinates."""
        return {prefix + name: state for prefix, states in self._gathered((_prefix(self._coordinates), rng.capture()))
                for name, state in states.items()}

    # ---- load --------------------------------------------------------------------------------------------------

    def begin_load(self, folder: Path, model: dict[str, Any]) -> None:
        """Begin to read a checkpoint into the model and the optimizer. Every training rank calls this, then `wait` and
        `finish_load`.

        Args:
            model: must equal `state["model"]`.

        Raises:
            UserError: on every rank. The checkpoint is incomplete, not this user's, or of another model, or its tensors
                do not exactly match this model and optimizer. One without optimizer state is refused, never half
                loaded.
        """
        shared: list[Any] = [None, None]
        with self._together(folder):
            if self._first:
                state = read_state(folder)
                _refuse_other_model(folder, state["model"], model)
                shared = [state, read_index(folder)]
        dist.broadcast_object_list(shared, group=self._group)
        index: dict[str, StoredTensor]
        self._loading, index = shared
        with self._together(folder):
            pieces = pieces_of(self._chunks, self._optimizer)
            reads = checkpoint_tensors.reads_of(pieces, index)
        asked = set[str]().union(*self._gathered({piece.key for piece in pieces}))
        with self._together(folder):
            if unexpected := sorted(index.keys() - asked):
                raise checkpoint_tensors.Misfit(f"it also has {', '.join(unexpected[:3])}")
        _synchronise()
        self._transfer = Transfer(partial(self._read, folder, reads))

    def _read(self, folder: Path, reads: Collection[checkpoint_tensors.Read], moved: Callable[[int], None]) -> None:
        with self._together(folder):
            checkpoint_tensors.read(reads, folder, moved)

    def finish_load(self, folder: Path) -> Loaded:
        """Exchange what was read, after `wait`, and restore counters and random states. Weights, master weights, Adam's
        moments and step, and the position of the schedule carry over to any layout. Random states carry over only to an
        equal layout."""
        state, optimizer = self._loading, self._optimizer
        complete(optimizer, state["updates"])
        same_layout = state["layout"] == self._layout
        with self._together(folder):
            if same_layout:
                rng.restore(_random_states_of(folder, self._coordinates))
        optimizer.updates, optimizer.skipped_in_a_row = state["updates"], state["skipped_in_a_row"]
        return Loaded(state, same_layout)

    # ---- both --------------------------------------------------------------------------------------------------

    def progress(self, within_s: float) -> files.Transferred:
        """How far the save or the load is. Returns when it ends, at the latest after `within_s` seconds.

        Raises:
            UserError, RuntimeError: as `wait`, once.
        """
        if self._transfer is not None:
            self._progress = self._transfer.progress(within_s)
            if self._progress.finished:
                self.wait()
        return self._progress

    def wait(self) -> None:
        """Wait for the end of the save or the load, if there is one.

        Raises:
            UserError: on every rank: the disk is full, or a file could not be written or read.
            RuntimeError: on every rank: anything else that went wrong on one. The message names the rank.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.result()

    def _gathered(self, value: Any) -> list[Any]:
        """The value of every rank, in their order."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def _together(self, folder: Path, needed: int | None = None) -> Iterator[None]:
        """Run a block on all ranks. If it fails on one, all ranks raise, and none keeps waiting in a collective.

        Failures that the user can fix become UserErrors. The other ranks raise the first failing rank's message.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self._gathered(None if failure is None else _told(failure, folder, needed))
        for message in told:
            if isinstance(message, UserError):
                raise message from failure
        for rank, message in enumerate(told):
            if message is not None:
                raise RuntimeError(f"checkpoint {folder}: rank {rank} failed: {message}") from failure


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
def _discarding(folder: Path | None) -> Iterator[None]:
    """Remove the partial folder if the block fails."""
    try:
        yield
    except Exception:
        if folder is not None:
            files.discard(folder)
        raise


def _told(error: Exception, folder: Path, needed: int | None) -> UserError | str:
    if isinstance(error, UserError):
        return error
    if needed is not None and files.is_disk_full(error):
        return files.disk_full(files.partial_of(folder), needed)
    if isinstance(error, OSError):
        return UserError(f"the checkpoint cannot be written or read: {error}", where=str(folder),
                         fix="check permissions and the state of the file system")
    if isinstance(error, checkpoint_tensors.Misfit):
        return UserError(f"the checkpoint does not fit this run's model and optimizer: {error}", where=str(folder),
                         fix="use the model.path, trainer.dtype and trainer.distributed_optimizer that it was "
                             "written with")
    return f"{type(error).__name__}: {error}"


def _page_locked(memory: torch.Tensor) -> torch.Tensor:
    """The memory, page-locked if there is a GPU. Torch's allocator of pinned memory would round its size up to a power
    of two."""
    if torch.cuda.is_available():
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            log.warning("cannot page-lock %.1f GB for checkpoints (CUDA error %d): copying to the host will be slow",
                        memory.numel() / 1e9, code)
    return memory


def _synchronise() -> None:
    """Wait for the GPU: another thread does not see the order of this one's stream."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _random_states_of(folder: Path, coordinates: RankCoordinates) -> dict[str, torch.Tensor]:
    prefix = _prefix(coordinates)
    with safe_open(folder / RNG, framework="pt") as file:
        return {key.removeprefix(prefix): file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}


def _prefix(coordinates: RankCoordinates) -> str:
    return f"tp{coordinates.tp}.cp{coordinates.cp}.dp{coordinates.dp}.pp{coordinates.pp}/"
