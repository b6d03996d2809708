"""The folder of a checkpoint, which is either complete or absent. No torch here.

    checkpoints/step-000050/            complete.json names every file and its size
    checkpoints/.step-000100.partial/   being written; it is never resumed, and the next checkpoint removes it

A checkpoint is written under the hidden name, every file is synced, `complete.json` is written last, and one rename
makes it visible. docs/checkpoints.md lists the files.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.errors import UserError

log = logging.getLogger(__name__)

COMPLETE = "complete.json"
_NAME = re.compile(r"step-(\d{6,})")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Part = Literal["prepare", "write", "read_back"]
"""The parts of an export, with barriers between them (`hf_write`)."""


@dataclass(frozen=True)
class Exported:
    """One rank's answer to a part of an export."""

    digests: Mapping[str, int]
    error: str | None = None


@dataclass(frozen=True)
class Transferred:
    """How far a rank is with writing or reading its share of a checkpoint."""

    nbytes: int
    """Bytes of tensors so far."""
    seconds: float
    finished: bool


def checkpoint_folder(root: Path, step: int) -> Path:
    """Path of the checkpoint of a step in the run's `checkpoints` folder."""
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise UserError(f"{folder.name} is not the name of a checkpoint", where=str(folder),
                        fix="checkpoints are named step-000050")
    return int(match[1])


def latest_complete(root: Path) -> Path | None:
    """The newest checkpoint under `root` whose files all exist with the sizes they were written with.

    An incomplete checkpoint is skipped with a warning that gives the reason.
    """
    complete = complete_checkpoints(root)
    return complete[-1] if complete else None


def complete_checkpoints(root: Path) -> list[Path]:
    """All complete checkpoints under `root`, oldest first."""
    if not root.is_dir():
        return []
    found = []
    for folder in sorted((f for f in root.iterdir() if _NAME.fullmatch(f.name) and f.is_dir()), key=step_of):
        problem = incomplete_because(folder)
        if problem is None:
            found.append(folder)
        else:
            log.warning("skipping checkpoint %s: %s", folder, problem)
    return found


def incomplete_because(folder: Path) -> str | None:
    """What is missing from a checkpoint, or None if it is complete."""
    if not folder.is_dir():
        return "the folder does not exist"
    marker = folder / COMPLETE
    if not marker.is_file():
        return f"{COMPLETE} is missing: writing it did not finish"
    try:
        sizes = json.loads(marker.read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{COMPLETE} cannot be read ({error})"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes, {size:,} were written"
    return None


def refuse_foreign(folder: Path) -> None:
    """Refuse a checkpoint that another user could have written: owned by another user, or writable by others.

    Megatron's format contains one pickle (`.metadata`). Only data classes are loaded from it
    (`megatron_rl.trainer.checkpoint_index`), but anyone who can write a checkpoint controls what the run trains.
    """
    for path in [folder, *folder.iterdir()]:
        status = path.lstat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise UserError(f"{path.name} in the checkpoint is neither a file nor a folder", where=str(path),
                            fix="restore the checkpoint from a clean copy")
        if status.st_uid != os.geteuid():
            raise UserError(f"the checkpoint belongs to user id {status.st_uid}, not to you ({os.geteuid()})",
                            where=str(path), fix=f"if you trust it: chown -R $(id -u) {folder}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(f"others may write to the checkpoint (mode {stat.S_IMODE(status.st_mode):o})",
                            where=str(path), fix=f"if you trust it: chmod -R go-w {folder}")


def begin(folder: Path) -> Path:
    """Create an empty folder next to the final one, private while it is written."""
    partial = partial_of(folder)
    if folder.exists():
        raise UserError(f"the checkpoint {folder.name} already exists", where=str(folder),
                        fix="remove it, or continue from it (run.resume=auto)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    return partial


def partial_of(folder: Path) -> Path:
    """Path at which a checkpoint is written until it is complete."""
    return folder.parent / f".{folder.name}.partial"


def publish(folder: Path, facts: dict) -> int:
    """Make the partial folder durable and visible as `folder`. Returns its size in bytes.

    `facts` go into `complete.json` next to the file sizes, for people.
    """
    partial = partial_of(folder)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    write_durably(partial / COMPLETE, json.dumps({**facts, "files": sizes}, indent=2).encode())
    for path in [*files, partial / COMPLETE]:
        path.chmod(0o644)
        _sync(path)
    partial.chmod(0o755)
    _sync(partial)
    partial.rename(folder)
    _sync(folder.parent)
    return sum(sizes.values())


def discard(folder: Path) -> None:
    """Remove the partial folder of a failed checkpoint to free its space."""
    partial = partial_of(folder)
    if partial.exists():
        shutil.rmtree(partial)


def remove_old(root: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints, and the partial folders of earlier attempts.

    Call it after a checkpoint has become visible, so that the newest is never at risk. Returns the removed folders.
    """
    removed = complete_checkpoints(root)[:-keep]
    remove(removed)
    for leftover in [*root.glob(".step-*.removed"), *root.glob(".step-*.partial")]:
        shutil.rmtree(leftover)
    return removed


def remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints. They are renamed first, so an interrupted removal leaves nothing that looks complete."""
    doomed = [folder.rename(folder.parent / f".{folder.name}.removed") for folder in folders]
    for folder in doomed:
        shutil.rmtree(folder)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and sync it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def refuse_too_small(partial: Path, needed: int) -> None:
    """Refuse early if the file system clearly has too little room."""
    space = os.statvfs(partial)
    free = space.f_bavail * space.f_frsize
    if free < needed:
        raise disk_full(partial, needed, free)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a full disk, an exhausted quota or a file size limit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full(partial: Path, needed: int, free: int | None = None) -> UserError:
    """The message for a disk with too little room for a checkpoint."""
    has = "" if free is None else f"; {free:,} bytes are free"
    return UserError(
        f"no room for the checkpoint: it needs {needed:,} bytes{has}. Earlier checkpoints are unchanged.",
        where=str(partial.parent),
        fix="free space or raise the quota and start again (run.resume=auto continues from the last complete "
            "checkpoint); run.dir moves the run, a smaller checkpoint.keep uses less space")


def unlike(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Names whose values differ or that one side lacks."""
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def changed_since(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    """One line per identity (data set, tokenizer, template, plan, ...) that has changed since the save."""
    return [f"{name} has changed since the checkpoint: {saved.get(name) or 'not recorded'} -> "
            f"{current.get(name) or 'none'}" for name in unlike(saved, current)]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
