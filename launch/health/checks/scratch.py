"""Local space: Ray's session and spilled objects, and shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from launch.health.check import Check, critical, ok, warning
from launch.health.expected import GIB, Expected

SHM = Path("/dev/shm")
NONE_LEFT_BYTES = GIB // 2
LONGEST = 60
"""Bytes of a temporary folder's path. vLLM and multiprocessing put sockets into it, whose paths have 107 at most."""


def check(expected: Expected, environment: Mapping[str, str]) -> list[Check]:
    """The folder is judged as it is named: Python's own choice falls back to /tmp, or to the working directory on the
    shared disk, where that one cannot be written."""
    folder = Path(expected.scratch or environment.get("TMPDIR") or "/tmp")
    length = len(os.fsencode(folder))
    if length > LONGEST:
        return [critical("disk.scratch", length, f"{folder} has {length} bytes: with more than {LONGEST} the paths of "
                         "sockets in it become longer than the 107 bytes that a socket may have", "name a shorter "
                         "folder as scratch in the site profile, or in TMPDIR; a short link to it will do")]
    return [_space("disk.scratch", folder, expected.scratch_bytes, "clean it up, or name another folder in the site "
                   "profile"),
            _space("disk.shm", SHM, expected.shm_bytes, "give the container more shared memory, or clean /dev/shm: "
                   "NCCL, vLLM and Ray's object store live there")]


def _space(name: str, folder: Path, wanted: int, remedy: str) -> Check:
    if not folder.is_dir():
        return critical(name, None, f"{folder} is not there", remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        return critical(name, None, f"{folder} may not be written", remedy)
    free = shutil.disk_usage(folder).free
    told = f"{folder}: {free / GIB:.1f} GiB free"
    if free < NONE_LEFT_BYTES:
        return critical(name, free, told, remedy)
    if free < wanted:
        return warning(name, free, f"{told}, {wanted / GIB:.0f} wanted", remedy)
    return ok(name, free, told)
