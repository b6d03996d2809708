"""Shared memory (/dev/shm) that killed processes leave behind. It occupies a node's memory until the node reboots.

A vLLM engine with tensor parallelism leaves its message queues as `psm_...` (four of up to 240 MiB for two ranks), and
its CPU buffers as `vllm_dist_...`. Ray's object store leaves nothing, because its file never has a name. A name does
does not tell whose segment it is, and a program may reopen one that it has closed. A name alone is no reason to remove
a segment: only segments that an attempt's processes were seen to hold, and that no process holds now, are removed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SHM = "/dev/shm/"
KNOWN = re.compile(r"vllm|psm_|torch_|nccl-")
"""Prefixes of the segments of vLLM, Python's `shared_memory` (vLLM's queues), torch and NCCL."""


def held(pids: Iterable[int]) -> set[str]:
    """Segments with a known prefix that these processes have mapped or open."""
    return {path for pid in pids for path in _held(pid)
            if KNOWN.match(path.removeprefix(SHM)) and not path.endswith(" (deleted)")}


def remove(segments: Iterable[str]) -> list[str]:
    """Remove the segments that belong to this user and that no process has mapped or open. Returns them."""
    found = []
    left = {path for path in segments if path.startswith(SHM) and _own(path)}
    if left:
        left -= {path for pid in psutil.pids() for path in _held(pid)}
    for path in sorted(left):
        with suppress(OSError):     # it has already been removed
            os.unlink(path)
            found.append(path)
    return found


def _own(path: str) -> bool:
    """Whether a segment belongs to this user and is closed to all others. Only this user's processes, which can be
    inspected, may then have it open."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _held(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped or open. Empty if it has ended or belongs to another user."""
    folder, found = Path(f"/proc/{pid}"), []
    with suppress(OSError):
        lines = (folder / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        found += [line.split(maxsplit=5)[-1] for line in lines if SHM in line]
    with suppress(OSError):
        for name in os.listdir(folder / "fd"):
            with suppress(OSError):     # closed in the meantime
                found.append(os.readlink(folder / "fd" / name))
    return {path for path in found if path.startswith(SHM)}
