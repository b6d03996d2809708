"""Shared memory (/dev/shm) that processes leave when KILL ends them: it stays memory of the node until that is booted.

The message queues of a vLLM engine with tensor parallelism stay as `psm_...` (four of up to 240 MiB for two ranks), its
buffers on a CPU as `vllm_dist_...`. Ray's object store leaves nothing: its file has no name from the start. The names
say nothing of whose a segment is, and a program may have closed one that it will open again. So nothing is judged by
its name alone: removed is what processes of an attempt were seen to hold, and no process holds now.
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
"""How the segments of vLLM, Python's `shared_memory` (vLLM's queues), torch and NCCL begin."""


def held(pids: Iterable[int]) -> set[str]:
    """Segments with a known name that these processes have mapped or open."""
    return {path for pid in pids for path in _held(pid)
            if KNOWN.match(path.removeprefix(SHM)) and not path.endswith(" (deleted)")}


def remove(segments: Iterable[str]) -> list[str]:
    """Remove those that are this user's and that nobody has mapped or open; returns them."""
    found = []
    left = {path for path in segments if path.startswith(SHM) and _own(path)}
    if left:
        left -= {path for pid in psutil.pids() for path in _held(pid)}
    for path in sorted(left):
        with suppress(OSError):     # it went by itself
            os.unlink(path)
            found.append(path)
    return found


def _own(path: str) -> bool:
    """Of this user, and closed to all others: only processes of this user, which can be looked into, may have it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _held(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped or open. Empty for one that has ended, or is another user's."""
    folder, found = Path(f"/proc/{pid}"), []
    with suppress(OSError):
        lines = (folder / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        found += [line.split(maxsplit=5)[-1] for line in lines if SHM in line]
    with suppress(OSError):
        for name in os.listdir(folder / "fd"):
            with suppress(OSError):     # closed meanwhile
                found.append(os.readlink(folder / "fd" / name))
    return {path for path in found if path.startswith(SHM)}
