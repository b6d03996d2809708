"""The disk kind of the weight sync, on the driver: versions of the weights as Hugging Face folders.

    weights/step-000060/            config, tokenizer, safetensors
      complete.json                 size of each file, digest of each tensor
    weights/.step-000070.partial/   being written, or left behind by a crash

Every training rank writes the bytes that it owns. Then the ranks read the files back, each a share of the tensors, and
the folder gets its name only if the digests equal those of the ranks. Like the coordinator, this module knows the ranks
only as handles with awaitable methods. No torch here.
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


class WeightWriter(Protocol):
    """A training rank, as this module sees it (`driver.handles.RemoteTrainer`)."""

    def export(self, folder: str, part: Part) -> Awaitable[Exported]:
        """Errors of the file system are returned in the answer, not raised, because they do not end a run."""


@dataclass(frozen=True)
class WrittenVersion:
    """A version on disk, complete and read back."""

    folder: Path
    nbytes: int
    write_s: float
    read_back_s: float


class NotWritten(UserError):
    """A version could not be written. Earlier versions are unchanged, and training continues if nothing needs it."""


class VersionsOnDisk:
    """Writes the versions of a run.

    Args:
        writers: one handle per training rank, by rank.
        root: folder of the versions, on a file system that all ranks and this process see.
        keep: number of complete versions to keep. Older ones are removed once a new one is complete.
    """

    def __init__(self, writers: Mapping[int, WeightWriter], root: Path, keep: int) -> None:
        self._writers, self.root, self._keep = dict(writers), root, keep
        self.alive: Callable[[], None] = lambda: None
        """Called whenever a rank has answered."""

    def forget_after(self, version: int) -> list[Path]:
        """Remove versions after `version`, from which a run continues: their steps are repeated and may give other
        weights. Returns the removed folders."""
        later = [folder for folder in files.complete_checkpoints(self.root) if files.step_of(folder) > version]
        files.remove(later)
        return later

    async def write(self, version: int) -> WrittenVersion:
        """Write the weights that the ranks hold now. They may change again once this has returned.

        Raises:
            NotWritten: no space, another fault of the file system, or the files do not match the ranks' weights.
            SyncError: a rank died.
        """
        folder = files.checkpoint_folder(self.root, version)
        written = await write_folder(self._writers, folder, lambda: self.alive())
        try:
            files.remove_old(self.root, self._keep)
        except OSError as error:            # on NFS, a file that is being read keeps its folder
            log.warning("older versions in %s remain: %s", self.root, error)
        return written


async def write_folder(writers: Mapping[int, WeightWriter], folder: Path,
                       alive: Callable[[], None] = lambda: None) -> WrittenVersion:
    """Write one folder (`step-000060`), which appears complete or not at all. Errors as in `VersionsOnDisk.write`.
    `alive` is called whenever a rank has answered."""
    started = time.monotonic()
    try:
        await _each({0: writers[0]}, folder, "prepare", alive)
        held = await _each(writers, folder, "write", alive)
        marks = [time.monotonic()]
        found = await _each(writers, folder, "read_back", alive)
        if wrong := files.unlike(held, found):
            raise NotWritten(f"the files do not hold what the training ranks hold: {', '.join(wrong[:5])}"
                             + (f" and {len(wrong) - 5} more tensors" if len(wrong) > 5 else ""), where=str(folder),
                              fix="check the nodes' kernel logs for faults of the file system")
        facts = {"version": files.step_of(folder), "digests": {name: f"{value:016x}" for name, value in held.items()}}
        try:
            nbytes = files.publish(folder, facts)
        except OSError as error:
            raise NotWritten(f"the finished weights cannot be published: {error}", where=str(folder),
                             fix="check permissions, space and the state of the file system") from error
    except NotWritten:
        with contextlib.suppress(OSError):  # the next version tries again
            files.discard(folder)
        raise
    marks.append(time.monotonic())
    return WrittenVersion(folder, nbytes, marks[0] - started, marks[1] - marks[0])


async def _each(writers: Mapping[int, WeightWriter], folder: Path, part: Part,
                alive: Callable[[], None]) -> dict[str, int]:
    """Make one call per rank. Returns the sum of their digests by tensor. There is no deadline, because the speed of a
    file system is unknown; a run's hang watch notices if no rank answers."""
    calls = {trainer_name(rank): writer.export(str(folder), part) for rank, writer in writers.items()}
    found = await outcomes(calls, math.inf, arrived=lambda name, outcome: alive())
    raise_failures(found)
    failed = {name: answer.error for name, answer in found.items() if answer.error}
    if failed:
        name, error = next(iter(failed.items()))
        raise NotWritten(f"{name} could not {part.replace('_', ' ')} the weights: {error}"
                         + (f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""), where=str(folder),
                         fix="check space, quota and permissions there, or write fewer versions (weight_sync.disk)")
    total: dict[str, int] = {}
    for answer in found.values():
        for tensor, digest in answer.digests.items():
            total[tensor] = (total.get(tensor, 0) + digest) % (1 << 64)
    return total
