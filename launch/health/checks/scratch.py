"""Checks local space for Ray's session and spilled objects, and shared memory."""

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
"""Maximum path bytes of a temporary folder: vLLM and multiprocessing put sockets into it, limited to 107 bytes."""


def check(expected: Expected, environment: Mapping[str, str]) -> list[Check]:
    """Checks the configured folder itself: if it is not writable, Python falls back to /tmp or to the working directory
    on the shared disk."""
    folder = Path(expected.scratch or environment.get("TMPDIR") or "/tmp")
    length = len(os.fsencode(folder))
    if length > LONGEST:
        return [critical("disk.scratch", length, f"{folder} has {length} bytes: with more than {LONGEST}, paths of "
                         "sockets in it exceed the limit of 107 bytes", "set a shorter folder, or a short link to "
                         "it, as scratch in the site profile or in TMPDIR")]
    return [_space("disk.scratch", folder, expected.scratch_bytes, "clean it up, or set another folder in the site "
                   "profile"),
            _space("disk.shm", SHM, expected.shm_bytes, "give the container more shared memory, or clean up /dev/shm, "
                   "which NCCL, vLLM and Ray's object store use")]


def _space(name: str, folder: Path, wanted: int, remedy: str) -> Check:
    if not folder.is_dir():
        return critical(name, None, f"{folder} does not exist", remedy)
    if not os.access(folder, os.W_OK | os.X_OK):
        return critical(name, None, f"{folder} is not writable", remedy)
    free = shutil.disk_usage(folder).free
    told = f"{folder}: {free / GIB:.1f} GiB free"
    if free < NONE_LEFT_BYTES:
        return critical(name, free, told, remedy)
    if free < wanted:
        return warning(name, free, f"{told}, {wanted / GIB:.0f} wanted", remedy)
    return ok(name, free, told)
