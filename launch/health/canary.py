"""The canary of the shared file system: a node writes a question file, and the leader writes an answer file.

It measures how long a write takes, how long the other side takes to see it, and how far apart the two clocks are. A
node writes `<node>.ask` with its time t1. The leader sees the file at its time t2 and writes `<node>.answer` at t3. The
node sees the answer at t4. As in NTP (RFC 5905, section 8), the offset of the leader's clock is

    ((t2 - t1) + (t3 - t4)) / 2,   wrong by at most half of the round trip (t4 - t1) - (t3 - t2).

Slow visibility therefore widens the error and does not look like clock skew. Time stamps of the file system are not
used, because some file systems take them from the client and others from the server.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.files.shared import patiently, read_shared, write_atomically

FOLDER = "canary"
"""In the attempt's folder."""
TIMEOUT_S = 60.0
"""On NFS, a file may stay invisible on another node for 30 s and more (attribute caches)."""
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Canary:
    """The measurement of one node."""

    write_s: float
    """Seconds to write, fsync and rename a small file."""
    round_trip_s: float
    """Seconds from the question being written to its answer being read, minus the leader's own time."""
    offset_s: float
    """The leader's clock minus this node's clock, in seconds."""
    error_s: float
    """Maximum error of the offset, in seconds."""


def ask(attempt: Path, node: str, timeout_s: float = TIMEOUT_S) -> Canary | None:
    """Ask the leader and wait for its answer. Returns None if no answer arrives in time.

    Raises:
        OSError: the question cannot be written.
    """
    folder = attempt / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    answer = folder / f"{node}.answer"
    answer.unlink(missing_ok=True)
    began = time.perf_counter()
    t1 = time.time()
    _write(folder / f"{node}.ask", {"t1": t1})
    write_s = time.perf_counter() - began
    deadline = began + timeout_s
    while (text := read_shared(answer)) is None or text.get("t1") != t1:
        if time.perf_counter() > deadline:
            return None
        time.sleep(LOOK_EVERY_S)
    # Elapsed time between the two readings, from a clock that cannot be set.
    t4 = t1 + (time.perf_counter() - began)
    return measured(write_s, t1, text["t2"], text["t3"], t4)


def measured(write_s: float, t1: float, t2: float, t3: float, t4: float) -> Canary:
    """The result from the four times of a question, see the module docstring."""
    round_trip_s = (t4 - t1) - (t3 - t2)
    return Canary(write_s, round_trip_s, ((t2 - t1) + (t3 - t4)) / 2, round_trip_s / 2)


class Answers:
    """The leader's side of the canary."""

    def __init__(self, attempt: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = attempt / FOLDER, clock
        self._seen: dict[str, int] = {}
        """Question -> its inode. A repeated question is a new file; an old file is not read again."""

    def give(self) -> list[str]:
        """Answer every new question and return the nodes that asked. Called repeatedly while nodes may ask."""
        try:
            asked = patiently(lambda: {entry.name: entry.inode() for entry in os.scandir(self._folder)
                                       if entry.name.endswith(".ask")})
        except FileNotFoundError:
            return []
        answered = []
        for name, inode in sorted(asked.items()):
            if self._seen.get(name) == inode:
                continue
            question = read_shared(self._folder / name)
            if question is None:
                continue
            node, t2 = name.removesuffix(".ask"), self._clock()
            _write(self._folder / f"{node}.answer", {"t1": question["t1"], "t2": t2, "t3": self._clock()})
            self._seen[name] = inode
            answered.append(node)
        return answered


def _write(path: Path, values: dict[str, float]) -> None:
    write_atomically(path, json.dumps(values), durable=True)
