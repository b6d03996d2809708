"""The processes of an attempt as they describe themselves: who they are, where they log, their first error.

Each process writes `components/<name>.json` when it starts and `errors/<name>.json` when it fails. The launcher
reads these files and never asks Ray: they are there when Ray is not.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace

import psutil

from launch.runtime.attempts import Attempt, write_atomically


@dataclass(frozen=True)
class Pid:
    """A process of this node: its pid, and its creation time, so that a reused pid is not taken for it."""

    pid: int
    started: float

    @staticmethod
    def of(process: psutil.Process) -> Pid:
        return Pid(process.pid, process.create_time())

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
class ComponentRecord:
    """One component of the attempt: a process of ours, and the processes that it cannot do without."""

    name: str
    """`driver`, `trainer-3`, `rollout-0`, `reward-0`."""
    process: Pid
    node: str
    """Pids mean something on this node only."""
    log: str
    needs: tuple[Pid, ...] = ()
    """Processes that a library started for it: vLLM's engine core and workers."""

    def alive(self) -> bool:
        return self.process.alive() and all(each.alive() for each in self.needs)


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
    record = ComponentRecord(name, Pid.of(psutil.Process()), node, str(attempt.logs / f"{name}.log"))
    _write(attempt, record)
    return record


def register_children(attempt: Attempt, record: ComponentRecord) -> ComponentRecord:
    """Called by a component whose children must live as long as it does, when all of them run."""
    record = replace(record, needs=tuple(Pid.of(child) for child in psutil.Process().children(recursive=True)))
    _write(attempt, record)
    return record


def _write(attempt: Attempt, record: ComponentRecord) -> None:
    write_atomically(attempt.folder / "components" / f"{record.name}.json", json.dumps(asdict(record)))


def record_error(attempt: Attempt, name: str, summary: str, traceback: str, *, user_error: bool = False) -> None:
    """Called by a component that fails. Only its first error counts."""
    path = attempt.folder / "errors" / f"{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(asdict(ErrorRecord(name, time.time(), summary, traceback, user_error))))


def components(attempt: Attempt) -> list[ComponentRecord]:
    return [component(attempt, path.stem) for path in sorted((attempt.folder / "components").glob("*.json"))]


def component(attempt: Attempt, name: str) -> ComponentRecord:
    """The record of one component."""
    path = attempt.folder / "components" / f"{name}.json"
    return _record(json.loads(path.read_text(encoding="utf-8")))


def _record(values: dict) -> ComponentRecord:
    return ComponentRecord(**{**values, "process": Pid(**values["process"]),
                              "needs": tuple(Pid(**each) for each in values["needs"])})


def dead(attempt: Attempt, node: str) -> list[ComponentRecord]:
    """The components of `node`, this one, that no longer run, the driver aside."""
    return [record for record in components(attempt)
            if record.node == node and record.name != "driver" and not record.alive()]


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


def first_failure(attempt: Attempt, node: str) -> Failure:
    """The cause of a failure, as far as it shows from `node`. Asked while the other processes still stand.

    An error that the user can mend explains everything that follows it. Else a process that died without a word comes
    before the errors of its peers, which only tell of a closed connection; then the earliest error of a component,
    then the driver's own.
    """
    recorded = errors(attempt)
    logs = {record.name: record.log for record in components(attempt)}
    for error in recorded:
        if error.user_error:
            return Failure(error.name, logs.get(error.name, ""), error.summary, user_error=True)
    talked = {error.name for error in recorded}
    for record in dead(attempt, node):
        if record.name not in talked or not record.process.alive():
            return silent_death(record)
    first = min(recorded, key=lambda error: (error.name == "driver", error.time))
    return Failure(first.name, logs.get(first.name, ""), f"{first.name} failed first: {first.summary}")


def silent_death(record: ComponentRecord) -> Failure:
    """What to tell of a component that is gone and said nothing."""
    who = f"{record.name} (pid {record.process.pid}, node {record.node})"
    if record.process.alive():
        lost = next(each.pid for each in record.needs if not each.alive())
        return Failure(record.name, record.log, f"{who} lost its process {lost}: killed, or out of memory")
    return Failure(record.name, record.log, f"{who} died without an error of its own: killed, or out of memory")
