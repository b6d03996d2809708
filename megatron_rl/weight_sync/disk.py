"""The disk kind of the weight sync, on the driver: versions of the weights as Hugging Face folders.

    weights/step-000060/            config, tokenizer, safetensors
      complete.json                 size of each file, digest of each tensor
    weights/.step-000070.partial/   being written, or what a crash left

Every training rank writes the bytes that it owns; then the ranks read the files back, each a share of the tensors, and
only if their digests are those of what the ranks hold does the folder get its name. Like the coordinator it knows the
ranks only as handles with awaitable methods. No torch here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.errors import UserError
from megatron_rl.layouts import step_folder as files
from megatron_rl.layouts.step_folder import Exported, Part
from megatron_rl.weight_sync.calls import outcomes, raise_failures
from megatron_rl.weight_sync.protocol import trainer_name

log = logging.getLogger(__name__)

class Writer(Protocol):
    """A training rank, as this module sees it (`driver.handles.RemoteTrainer`)."""

    def export(self, folder: str, part: Part) -> Awaitable[Exported]:
        """What the file system does is told in the answer, not raised: it ends no run."""


@dataclass(frozen=True)
class WrittenVersion:
    """A version that lies on disk, complete and read back."""

    folder: Path
    nbytes: int
    write_s: float
    read_back_s: float


class NotWritten(UserError):
    """A version could not be written; those before it are untouched, and the training goes on if nobody needs it."""


class VersionsOnDisk:
    """Writer of the versions of a run.

    Args:
        writers: one handle a training rank, by rank.
        root: their folder, on a file system that all ranks and this process see.
        keep: complete versions to keep; older ones go once a new one is complete.
    """

    def __init__(self, writers: Mapping[int, Writer], root: Path, keep: int) -> None:
        self._writers, self.root, self._keep = dict(writers), root, keep
        self.alive: Callable[[], None] = lambda: None
        """Called whenever a rank has answered."""

    def forget_after(self, version: int) -> list[Path]:
        """A run goes on from `version`: remove those after it, whose steps are made again and may end in other weights.
        Returns what was removed."""
        later = [folder for folder in files.complete_checkpoints(self.root) if files.step_of(folder) > version]
        files.remove(later)
        return later

    async def write(self, version: int) -> WrittenVersion:
        """Write the weights that the ranks hold now. They may be changed again when this has returned.

        Raises:
            NotWritten: no space, another fault of the file system, or the files do not hold what the ranks hold.
            SyncError: a rank died.
        """
        folder = files.checkpoint_folder(self.root, version)
        written = await write_folder(self._writers, folder, lambda: self.alive())
        try:
            files.remove_old(self.root, self._keep)
        except OSError as error:            # on NFS a file that somebody reads keeps its folder
            log.warning("older versions in %s stay: %s", self.root, error)
        return written


async def write_folder(writers: Mapping[int, Writer], folder: Path,
                       alive: Callable[[], None] = lambda: None) -> WrittenVersion:
    """Write one folder (`step-000060`): it appears complete, or not at all. Errors as in `VersionsOnDisk.write`;
    `alive` is called whenever a rank has answered."""
    started = time.monotonic()
    try:
        await _each({0: writers[0]}, folder, "prepare", alive)
        held = await _each(writers, folder, "write", alive)
        marks = [time.monotonic()]
        found = await _each(writers, folder, "read_back", alive)
        if wrong := sorted(name for name in held.keys() | found.keys() if held.get(name) != found.get(name)):
            raise NotWritten(f"what lies in the files is not what the training ranks hold: {', '.join(wrong[:5])}"
                             + (f" and {len(wrong) - 5} more tensors" if len(wrong) > 5 else ""), where=str(folder),
                             fix="look for faults of the file system in the nodes' kernel logs")
        facts = {"version": files.step_of(folder), "digests": {name: f"{value:016x}" for name, value in held.items()}}
        nbytes = _publish(folder, facts)
    except NotWritten:
        with contextlib.suppress(OSError):  # the next version tries again
            files.discard(folder)
        raise
    marks.append(time.monotonic())
    return WrittenVersion(folder, nbytes, marks[0] - started, marks[1] - marks[0])


async def _each(writers: Mapping[int, Writer], folder: Path, part: Part, alive: Callable[[], None]) -> dict[str, int]:
    """One call a rank; the sum of their digests by tensor. There is no deadline: nobody knows how fast a file system
    is, and a run's hang watch sees that nobody answers."""
    calls = {trainer_name(rank): writer.export(str(folder), part) for rank, writer in writers.items()}
    found = await outcomes(calls, math.inf, arrived=lambda name, outcome: alive())
    raise_failures(found)
    failed = {name: answer.error for name, answer in found.items() if answer.error}
    if failed:
        name, error = next(iter(failed.items()))
        raise NotWritten(f"{name} could not {part.replace('_', ' ')} the weights: {error}"
                         + (f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""), where=str(folder),
                         fix="look at space, quota and permissions there, or write fewer versions (weight_sync.disk)")
    total: dict[str, int] = {}
    for answer in found.values():
        for tensor, digest in answer.digests.items():
            total[tensor] = (total.get(tensor, 0) + digest) % (1 << 64)
    return total


def _publish(folder: Path, facts: dict) -> int:
    try:
        return files.publish(folder, facts)
    except OSError as error:
        raise NotWritten(f"the finished weights cannot be published: {error}", where=str(folder),
                         fix="check permissions, space and the state of the file system") from error
