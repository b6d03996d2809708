"""The canary of the shared file system: a question and an answer by files, between a node and the leader.

It measures what a job depends on: how long a write takes, how long until the other side sees it, and how far two
clocks are apart. A node writes `<node>.ask` with its time t1; the leader, seeing the file at its time t2, writes
`<node>.answer` at t3; the node sees that at t4. As in NTP (RFC 5905, section 8), the offset of the leader's clock is

    ((t2 - t1) + (t3 - t4)) / 2,   wrong by at most half of the round trip (t4 - t1) - (t3 - t2):

slow visibility widens the error and does not look like a skewed clock. Time stamps of the file system are not used:
on some it is the client that sets them, on others the server.
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
"""A file may stay invisible on another node of an NFS for 30 s and more (attribute caches)."""
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Canary:
    """What a node measured."""

    write_s: float
    """Write, fsync and rename of a small file."""
    round_trip_s: float
    """From the question being there to its answer being read, less the leader's own time."""
    offset_s: float
    """The leader's clock minus this node's."""
    error_s: float
    """The offset is wrong by at most this."""


def ask(attempt: Path, node: str, timeout_s: float = TIMEOUT_S) -> Canary | None:
    """Ask the leader and wait for its answer; None if none came in time.

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
    # Wall time between the two readings, from a clock that nobody sets.
    t4 = t1 + (time.perf_counter() - began)
    return measured(write_s, t1, text["t2"], text["t3"], t4)


def measured(write_s: float, t1: float, t2: float, t3: float, t4: float) -> Canary:
    """From the four times of a question, see the module."""
    round_trip_s = (t4 - t1) - (t3 - t2)
    return Canary(write_s, round_trip_s, ((t2 - t1) + (t3 - t4)) / 2, round_trip_s / 2)


class Answers:
    """The leader's side."""

    def __init__(self, attempt: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = attempt / FOLDER, clock
        self._seen: dict[str, int] = {}
        """Question -> its inode: a question that is asked again is another file, and an old one is not read again."""

    def give(self) -> list[str]:
        """Answer every new question and return the nodes that asked. Called again and again while nodes may ask."""
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
