"""The processes of an attempt as they describe themselves: who they are, where they log, their first error.

Each process writes `components/<name>.json` when it starts and `errors/<name>.json` when it fails. The launcher
reads these files and never asks Ray: they are there when Ray is not.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

import psutil

from launch.runtime.attempts import Attempt, write_atomically


@dataclass(frozen=True)
class ComponentRecord:
    """One process of the attempt."""

    name: str
    """`driver`, `trainer-3`, `rollout-0`, `reward-1`."""
    pid: int
    started: float
    """Creation time of the process, so that a reused pid is not taken for it."""
    node: str
    log: str

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def stopped(self) -> bool:
        """Whether a signal has stopped it (state T)."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class ErrorRecord:
    """The first exception that left a component."""

    name: str
    time: float
    summary: str
    """Last line of the traceback."""
    traceback: str
    user_error: bool = False


def register(attempt: Attempt, name: str, node: str) -> ComponentRecord:
    """Called by a component about itself, once, when it starts."""
    process = psutil.Process()
    record = ComponentRecord(name, process.pid, process.create_time(), node, str(attempt.logs / f"{name}.log"))
    write_atomically(attempt.folder / "components" / f"{name}.json", json.dumps(asdict(record)))
    return record


def record_error(attempt: Attempt, name: str, summary: str, traceback: str, *, user_error: bool = False) -> None:
    """Called by a component that fails. Only its first error counts."""
    path = attempt.folder / "errors" / f"{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(asdict(ErrorRecord(name, time.time(), summary, traceback, user_error))))


def components(attempt: Attempt) -> list[ComponentRecord]:
    return [ComponentRecord(**json.loads(path.read_text(encoding="utf-8")))
            for path in sorted((attempt.folder / "components").glob("*.json"))]


def errors(attempt: Attempt) -> list[ErrorRecord]:
    """All recorded errors, oldest first."""
    found = [ErrorRecord(**json.loads(path.read_text(encoding="utf-8")))
             for path in (attempt.folder / "errors").glob("*.json")]
    return sorted(found, key=lambda error: error.time)


@dataclass(frozen=True)
class Failure:
    """What to tell of an attempt that failed."""

    component: str
    log: str
    message: str
    user_error: bool = False
    """The user can mend it: configuration, model, data or reward."""


def first_failure(attempt: Attempt) -> Failure:
    """The cause of a failure, as far as it shows. Asked by the driver while the other processes still stand.

    An error that the user can mend explains everything that follows it. Else a process that died without a word comes
    before the errors of its peers, which only tell of a closed connection; then the earliest error of a component,
    then the driver's own.
    """
    recorded, records = errors(attempt), components(attempt)
    logs = {record.name: record.log for record in records}
    for error in recorded:
        if error.user_error:
            return Failure(error.name, logs.get(error.name, ""), error.summary, user_error=True)
    talked = {error.name for error in recorded}
    for record in records:
        if record.name not in talked and not record.alive():
            return Failure(record.name, record.log, f"{record.name} (pid {record.pid}, node {record.node}) died "
                                                    "without an error of its own: killed, or out of memory")
    first = min(recorded, key=lambda error: (error.name == "driver", error.time))
    return Failure(first.name, logs.get(first.name, ""), f"{first.name} failed first: {first.summary}")
