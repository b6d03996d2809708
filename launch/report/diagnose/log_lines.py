"""Lines of log files with the time at which they were written, for logs of any origin. Pure except for reading files.

Known formats: Python's logging and Ray's (`2026-11-29 16:41:41,396 driver INFO`), Ray's C++ (`[2026-11-29
16:41:41,396 E 1 1]`), vLLM (`INFO 11-29 16:41:32 [x.py:1]`), torch's C++ (`[rank3]:[E1129 16:41:17.123456
ProcessGroupNCCL.cpp:1]`) and Slurm (`CANCELLED AT 2026-11-29T16:41:17`). A line without a time has the time of the line
before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_FULL = re.compile(r"(?<!\d)(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_NO_YEAR = re.compile(r"(?<![\d-])(\d\d)-(\d\d) (\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"\[?[IWEF](\d{1,2})(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,9})")
_HEAD = 120
"""Times are searched only at the start of a line. Further on, a date may mean anything."""
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TAIL_BYTES = 256 << 10
MOST_BYTES = 64 << 20
"""Only this much of a log's end is read. A longer log was written by a loop."""


@dataclass(frozen=True, slots=True)
class LogFile:
    """A log file and the process that writes it."""

    path: Path
    name: str
    """`trainer-3`, `driver`, `ray`, `supervisor`, `job`."""
    node: str = ""
    started: float | None = None
    """Start time of its process, for lines before the first time."""

    @property
    def role(self) -> str:
        return re.sub(r"-\d+$", "", self.name)

    @property
    def rank(self) -> int | None:
        match = re.search(r"-(\d+)$", self.name)
        return int(match[1]) if match else None

    @property
    def label(self) -> str:
        return self.name if not self.node or self.node == "local" else f"{self.name}@{self.node}"


@dataclass(frozen=True, slots=True)
class LogLine:
    time: float
    source: LogFile
    number: int
    """From 1; 0 if only the end of the file was read."""
    text: str


def time_of(text: str, year: int) -> float | None:
    """The time stated in a line, in this machine's time zone.

    Args:
        year: used for formats without a year.
    """
    head = text[:_HEAD]
    try:
        if match := _FULL.search(head):
            return _seconds(f"{match[1]}T{match[2]}", match[3])
        if match := _GLOG.search(head):
            return _seconds(f"{year}-{int(match[1]):02}-{match[2]}T{match[3]}", match[4])
        if match := _NO_YEAR.search(head):
            return _seconds(f"{year}-{match[1]}-{match[2]}T{match[3]}", match[4])
    except ValueError:      # digits that only look like a date
        return None
    return None


def read(source: LogFile, *, tail: bool = False) -> Iterator[LogLine]:
    """The lines of a log in order, without colour codes, with times that never go back.

    Args:
        tail: read only the end of the file.
    """
    try:
        status = source.path.stat()
        with source.path.open("rb") as file:
            most = TAIL_BYTES if tail else MOST_BYTES
            cut = status.st_size > most
            file.seek(-most if cut else 0, 2 if cut else 0)
            texts = file.read().decode("utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return
    if cut:
        texts = texts[1:]
    if texts and not texts[-1]:
        texts.pop()
    yield from stamped(texts, source, datetime.fromtimestamp(status.st_mtime).year,
                       source.started or first_time(texts, status.st_mtime), 0 if cut else 1)


def stamped(texts: list[str], source: LogFile, year: int, start: float, first: int = 1) -> Iterator[LogLine]:
    """Lines with times. `start` is the time of lines before the first one that states a time."""
    now = start
    for offset, raw in enumerate(texts):
        text = ANSI.sub("", raw.rsplit("\r", 1)[-1] if "\r" in raw.rstrip("\r") else raw.rstrip("\r"))
        now = max(now, time_of(text, year) or now)
        yield LogLine(now, source, first + offset if first else 0, text)


def first_time(texts: list[str], written: float) -> float:
    """The first time stated in any of these lines, or else `written`."""
    year = datetime.fromtimestamp(written).year
    return next((time for text in texts if (time := time_of(ANSI.sub("", text), year)) is not None), written)


def _seconds(text: str, fraction: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() + float(f"0.{fraction or 0}")
