"""The logs of an attempt: merge them by time, filter them by role, rank and node, and follow them."""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from launch.errors import UserError
from launch.report.diagnose import log_lines
from launch.report.diagnose.log_lines import LogFile, LogLine
from launch.run.attempts import Attempt
from launch.run.components import components, dismissed
from launch.run.find import find_run, read_json
from launch.run.metrics import Tail

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)?\s")


@dataclass(frozen=True)
class Filter:
    """Selects logs. None matches every value."""

    role: str | None = None
    rank: int | None = None
    node: str | None = None

    def takes(self, source: LogFile) -> bool:
        return (self.role in (None, source.role, source.name) and self.rank in (None, source.rank)
                and self.node in (None, source.node))


def attempt_of(run: str, folder: str, number: int | None = None) -> Path:
    """The folder of an attempt of a run or job.

    Raises:
        UserError: the run does not exist, or it has not written anything yet.
    """
    found = find_run(run, folder, attempt=number)
    if found.attempt is None:
        what = f"job {found.job} has no attempt in {folder}/" if found.folder is None else (
            f"run {found.name!r} has no attempt yet")
        raise UserError(what, where=str(Path(folder).absolute()),
                        fix=f"megatron-rl status {run} says whether it waits, megatron-rl doctor {run} why it failed")
    return found.attempt


def sources(attempt: Path, *, ray_too: bool = False) -> list[LogFile]:
    """All logs of an attempt: those of its components, of the supervisors and of the batch script.

    Args:
        ray_too: include Ray's own logs, which are kept for failed attempts (many, and mostly noise).
    """
    found = []
    # The log of an engine that was started again begins with its first process.
    processes = [*dismissed(Attempt(attempt)), *components(Attempt(attempt))]
    records = {each.name: each for each in sorted(processes, key=lambda each: each.process.started, reverse=True)}
    for path in sorted(attempt.glob("logs/*.log")):
        record = records.get(path.stem)
        node, started = (record.node, record.process.started) if record else ("", None)
        found.append(LogFile(path, path.stem, node, started))
    for path in sorted([*attempt.glob("nodes/*/*.log"), *attempt.glob("nodes/*/logs/*.log")]):
        node = path.relative_to(attempt / "nodes").parts[0]
        found.append(LogFile(path, path.stem, node))
    if ray_too:
        kept = [path for suffix in ("log", "out", "err") for path in attempt.glob(f"**/ray/**/*.{suffix}")]
        known = {each.path for each in found}
        found += [LogFile(path, "ray-logs", "") for path in sorted(set(kept) - known)]
    log = read_json(attempt / "job.json").get("log")
    if log and Path(log).exists():
        found.append(LogFile(Path(log), "job", ""))
    return found


def choose(attempt: Path, wanted: Filter) -> list[LogFile]:
    """The logs that a filter selects.

    Raises:
        UserError: it selects none; the message names the roles, ranks and nodes that exist.
    """
    everything = sources(attempt, ray_too=wanted.role == "ray-logs")
    chosen = [source for source in everything if wanted.takes(source)]
    if chosen or wanted == Filter():
        return chosen
    roles = sorted({source.role for source in everything})
    ranks = sorted({source.rank for source in everything
                    if source.rank is not None and wanted.role in (None, source.role, source.name)})
    nodes = sorted({source.node for source in everything if source.node})
    raise UserError("no log matches " + " ".join(f"--{name} {value}" for name, value in vars(wanted).items()
                                              if value is not None), where=str(attempt),
                    fix=f"roles: {', '.join(roles) or 'none'}; ranks: {_ranges(ranks)}; "
                        f"nodes: {', '.join(nodes) or 'none'}")


def merged(chosen: Iterable[LogFile], *, tail: bool = False) -> Iterator[LogLine]:
    """The lines of several logs, sorted by time. Lines of one log keep their order."""
    return heapq.merge(*(log_lines.read(source, tail=tail) for source in chosen), key=lambda line: line.time)


def last(chosen: Sequence[LogFile], count: int) -> list[LogLine]:
    """The last `count` lines of all logs together."""
    return list(deque(merged(chosen, tail=True), maxlen=count))


def text_of(line: LogLine, width: int) -> str:
    """`16:41:41 trainer-3@h100-007  INFO step 37`: the time and the name appear once, at the start."""
    text = _STAMP.sub("", line.text).removeprefix(f"{line.source.name} ")
    return f"{datetime.fromtimestamp(line.time):%H:%M:%S} {line.source.label:<{width}}  {text}"


def as_json(line: LogLine) -> dict:
    return {"time": line.time, "component": line.source.name, "node": line.source.node, "file": str(line.source.path),
            "line": line.number, "text": line.text}


def label_width(chosen: Iterable[LogFile]) -> int:
    return min(28, max((len(source.label) for source in chosen), default=0))


@dataclass
class Follower:
    """Reads what is added to the logs of an attempt. Logs that appear later are read from their beginning."""

    attempt: Path
    wanted: Filter
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _times: dict[Path, float] = field(default_factory=dict)

    def start(self) -> None:
        """Skip what has been written so far."""
        self._tails = {source.path: Tail(source.path, source.path.stat().st_size) for source in self._chosen()
                       if source.path.exists()}

    def poll(self) -> list[LogLine]:
        """The lines completed since the last call, by time."""
        found: list[LogLine] = []
        for source in self._chosen():
            texts = self._tails.setdefault(source.path, Tail(source.path)).poll()
            if not texts:
                continue
            start = self._times.get(source.path) or log_lines.first_time(texts, time.time())
            lines = list(log_lines.stamped(texts, source, datetime.now().year, start, 0))
            self._times[source.path] = lines[-1].time
            found += lines
        return sorted(found, key=lambda line: line.time)

    def _chosen(self) -> list[LogFile]:
        return [source for source in sources(self.attempt) if self.wanted.takes(source)]


def follow(follower: Follower, every_s: float) -> Iterator[LogLine]:
    """Yield lines as they are added, until the attempt has its outcome and its logs have been read to the end."""
    while True:
        ended = (follower.attempt / "outcome.json").exists()      # checked before reading, so that no line is missed
        lines = follower.poll()
        yield from lines
        if ended and not lines:
            return
        time.sleep(every_s)  # between two polls of files that others write


def _ranges(numbers: Sequence[int]) -> str:
    """`0-7` or `0, 2, 5`."""
    if not numbers:
        return "none"
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))
