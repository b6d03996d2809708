"""The folder of a checkpoint: complete or absent, never in between. No torch here.

    checkpoints/step-000050/            complete.json names every file and its size
    checkpoints/.step-000100.partial/   being written; never resumed, removed by the next checkpoint

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
"""The parts of an export, with a barrier between them (`hf_write`)."""


@dataclass(frozen=True)
class Exported:
    """What one rank answers to a part of an export."""

    digests: Mapping[str, int]
    error: str | None = None


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies under the run's `checkpoints` folder."""
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise UserError(f"{folder.name} is not the name of a checkpoint", where=str(folder),
                        fix="checkpoints are named step-000050")
    return int(match[1])


def latest_complete(root: Path) -> Path | None:
    """The newest checkpoint under `root` whose files are all there with the sizes they were written with.

    One that fails this is passed over with a warning that says what is wrong.
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
            log.warning("passing over checkpoint %s: %s", folder, problem)
    return found


def incomplete_because(folder: Path) -> str | None:
    """What is missing from a checkpoint, or None if it is complete."""
    if not folder.is_dir():
        return "there is no such folder"
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
    """Refuse a checkpoint that someone else could have written: owned by another user, or writable by others.

    Megatron's format holds one pickle (`.metadata`). Its contents are checked as well before it is loaded
    (`megatron_rl.trainer.checkpoint`), but who can write a checkpoint can also make it train anything.
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
    """An empty folder aside, private while it is written."""
    partial = partial_of(folder)
    if folder.exists():
        raise UserError(f"the checkpoint {folder.name} exists already", where=str(folder),
                        fix="remove it, or go on from it (run.resume=auto)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    return partial


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder.parent / f".{folder.name}.partial"


def publish(folder: Path, facts: dict) -> int:
    """Make the partial folder durable and visible as `folder`; returns its size in bytes.

    `facts` go into `complete.json` next to the file sizes, for people who look.
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
    """Remove the partial folder of a checkpoint that failed, to give its space back."""
    partial = partial_of(folder)
    if partial.exists():
        shutil.rmtree(partial)


def remove_old(root: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` complete checkpoints, and what earlier attempts left half-written.

    Call it after a checkpoint has become visible, so that the newest is never at risk. Returns what was removed.
    """
    removed = complete_checkpoints(root)[:-keep]
    remove(removed)
    for leftover in [*root.glob(".step-*.removed"), *root.glob(".step-*.partial")]:
        shutil.rmtree(leftover)
    return removed


def remove(folders: Iterable[Path]) -> None:
    """Remove checkpoints. Out of sight first: a removal that is cut short leaves nothing that looks like one."""
    doomed = [folder.rename(folder.parent / f".{folder.name}.removed") for folder in folders]
    for folder in doomed:
        shutil.rmtree(folder)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and sync it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def refuse_too_small(partial: Path, needed: int) -> None:
    """Refuse at once what the file system has plainly no room for."""
    space = os.statvfs(partial)
    free = space.f_bavail * space.f_frsize
    if free < needed:
        raise disk_full(partial, needed, free)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is a full disk, an exhausted quota or a file size limit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def disk_full(partial: Path, needed: int, free: int | None = None) -> UserError:
    """The message for a disk that has no room for a checkpoint."""
    has = "" if free is None else f"; {free:,} bytes are free"
    return UserError(
        f"no room for the checkpoint: it needs {needed:,} bytes{has}. Earlier checkpoints are untouched.",
        where=str(partial.parent),
        fix="free space or raise the quota and start again (run.resume=auto goes on from the last complete "
            "checkpoint); run.dir moves the run, a smaller checkpoint.keep uses less")


def changed_since(saved: dict[str, str], current: dict[str, str]) -> list[str]:
    """One line for each identity (data set, tokenizer, template, plan, ...) that is not what it was at the save."""
    lines = []
    for name in sorted(saved.keys() | current.keys()):
        before, now = saved.get(name), current.get(name)
        if before != now:
            lines.append(f"{name} has changed since the checkpoint: {before or 'not recorded'} -> {now or 'none'}")
    return lines


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
