"""Signs of life that can be read without asking anybody, and without touching what is asked."""

from __future__ import annotations

import os
from pathlib import Path

LOCKS = Path("/proc/locks")


def lock_is_held(lock: Path, locks: Path = LOCKS) -> bool:
    """Whether a process of this machine holds `flock` on a file. Trying to take the lock would answer as well, and
    could make a launcher that starts at this moment believe that another one works in the run."""
    try:
        status = lock.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        lines = locks.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return False
    return any(words[1] == "FLOCK" and words[5] == wanted for words in map(str.split, lines)
               if len(words) > 5 and words[1] != "->")


def newest_beat(node_folder: Path) -> float | None:
    """When the supervisor of a node was last heard of (seconds since 1970): its beat, or else its greeting."""
    for name in ("beat", "hello.json"):
        if (node_folder / name).exists():
            return (node_folder / name).stat().st_mtime
    return None
