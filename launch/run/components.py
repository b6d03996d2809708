"""The processes of an attempt as they describe themselves: who they are, where they log, their first error.

Each process writes `components/<node>/<name>.json` when it starts and `errors/<name>.json` when it fails. The launcher
reads these files and never asks Ray: they are there when Ray is not. A pid means something on its own node only, so on
several nodes each node's supervisor judges its own and tells the others in `nodes/<node>/lost.json`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from launch import shared_memory
from launch.files.shared import names_in, patiently, read_shared, seen, write_atomically
from launch.files.waiting import wait_for
from launch.run.attempts import Attempt

NO_NODE = "-"
"""Folder of a component that was started outside a job."""


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
    segments: tuple[str, ...] = ()
    """Shared memory that it and they hold, see `launch.shared_memory`."""

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
    children = psutil.Process().children(recursive=True)
    held = shared_memory.held([os.getpid(), *(child.pid for child in children)])
    record = replace(record, needs=tuple(Pid.of(child) for child in children), segments=tuple(sorted(held)))
    _write(attempt, record)
    return record


def _write(attempt: Attempt, record: ComponentRecord) -> None:
    path = _file(attempt, record.node, record.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(record)))


def _file(attempt: Attempt, node: str, name: str) -> Path:
    """One folder a node: a supervisor reads its own, however many nodes there are."""
    return attempt.folder / "components" / (node or NO_NODE) / f"{name}.json"


def record_error(attempt: Attempt, name: str, summary: str, traceback: str, *, user_error: bool = False) -> None:
    """Called by a component that fails. Only its first error counts."""
    path = attempt.folder / "errors" / f"{name}.json"
    if not seen(path):
        write_atomically(path, json.dumps(asdict(ErrorRecord(name, time.time(), summary, traceback, user_error))))


def components(attempt: Attempt, node: str | None = None) -> list[ComponentRecord]:
    """All components of the attempt, or of one node, by name."""
    folder = attempt.folder / "components"
    nodes = names_in(folder) if node is None else [node or NO_NODE]
    found = [read_shared(folder / each / name, _record) for each in nodes for name in names_in(folder / each, ".json")]
    return sorted((record for record in found if record is not None), key=lambda record: record.name)


class NodeComponents:
    """The components of one node, read again only when their files have changed: a supervisor asks every second, for
    days, and so do those of all other nodes."""

    def __init__(self, attempt: Attempt, node: str) -> None:
        self._folder = attempt.folder / "components" / node
        self._known: dict[str, tuple[int, ComponentRecord]] = {}
        """File -> (its inode: a file that was replaced is another one, what it holds)."""

    def look(self) -> list[ComponentRecord]:
        """All that have registered by now."""
        try:
            inodes = patiently(lambda: {entry.name: entry.inode() for entry in os.scandir(self._folder)
                                        if entry.name.endswith(".json") and not entry.name.startswith(".")})
        except FileNotFoundError:
            return []
        for name, inode in inodes.items():
            if self._known.get(name, (None,))[0] != inode:
                record = read_shared(self._folder / name, _record)
                if record is not None:
                    self._known[name] = (inode, record)
        return [record for _, (_, record) in sorted(self._known.items())]


def component(attempt: Attempt, name: str) -> ComponentRecord:
    """The record of one component."""
    return next(record for record in components(attempt) if record.name == name)


def _record(text: str) -> ComponentRecord:
    values = json.loads(text)
    return ComponentRecord(**{**values, "process": Pid(**values["process"]),
                              "needs": tuple(Pid(**each) for each in values["needs"]),
                              "segments": tuple(values.get("segments", ()))})


def dead(attempt: Attempt, node: str) -> list[ComponentRecord]:
    """The components of `node`, this one, that no longer run, the driver aside."""
    return [record for record in components(attempt, node) if record.name != "driver" and not record.alive()]


def errors(attempt: Attempt) -> list[ErrorRecord]:
    """All recorded errors, oldest first."""
    folder = attempt.folder / "errors"
    found = [read_shared(folder / name) for name in names_in(folder, ".json")]
    return sorted((ErrorRecord(**values) for values in found if values), key=lambda error: error.time)


@dataclass(frozen=True)
class Failure:
    """What to tell of an attempt that failed."""

    component: str
    log: str
    message: str
    user_error: bool = False
    """The user can mend it: configuration, model, data or reward."""


def report_lost(attempt: Attempt, node: str, failure: Failure) -> None:
    """Called by the supervisor of `node`: something there is gone. Only the first report of a node counts."""
    path = attempt.folder / "nodes" / node / "lost.json"
    if not seen(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**asdict(failure), "time": time.time()}), durable=True)


def lost(attempt: Attempt) -> list[Failure]:
    """What the supervisors of all nodes have reported as gone. Who went without a word comes first, since the errors of
    others may only tell of a closed connection; then the oldest."""
    folder = attempt.folder / "nodes"
    reports = [report for report in (read_shared(folder / node / "lost.json") for node in names_in(folder)) if report]
    talked = _talked(attempt)
    return [Failure(**{name: value for name, value in report.items() if name != "time"})
            for report in sorted(reports, key=lambda report: (report["component"] in talked, report["time"]))]


def silently_lost(attempt: Attempt) -> list[Failure]:
    """Those of `lost` that left no error of their own."""
    talked = _talked(attempt)
    return [failure for failure in lost(attempt) if failure.component not in talked]


def await_silently_lost(attempt: Attempt, within_s: float) -> None:
    """Give the supervisors of other nodes time to say what died there: the driver hears of a death through a closed
    connection, at the same moment as they do, and then knows only who noticed it."""
    wait_for(lambda: [] if silently_lost(attempt) else ["a supervisor"], "to report a death", within_s,
             say=lambda line: None)


def _talked(attempt: Attempt) -> set[str]:
    return {error.name for error in errors(attempt)}


def first_failure(attempt: Attempt, node: str) -> Failure:
    """The cause of a failure, as far as it shows from `node` and from what the supervisors of other nodes reported.
    Asked while the other processes still stand.

    An error that the user can mend explains everything that follows it. Else a process that died without a word comes
    before the errors of its peers, which only tell of a closed connection; then the earliest error of a component,
    then the driver's own.
    """
    recorded = errors(attempt)
    logs = {record.name: record.log for record in components(attempt)}
    for error in recorded:
        if error.user_error:
            return Failure(error.name, logs.get(error.name, ""), error.summary, user_error=True)
    talked = _talked(attempt)
    for record in dead(attempt, node):
        if record.name not in talked or not record.process.alive():
            return silent_death(record)
    for failure in silently_lost(attempt):
        return failure
    first = min(recorded, key=lambda error: (error.name == "driver", error.time))
    return Failure(first.name, logs.get(first.name, ""), f"{first.name} failed first: {first.summary}")


def silent_death(record: ComponentRecord) -> Failure:
    """What to tell of a component that is gone and said nothing."""
    who = f"{record.name} (pid {record.process.pid}, node {record.node})"
    if record.process.alive():
        gone = next(each.pid for each in record.needs if not each.alive())
        return Failure(record.name, record.log, f"{who} lost its process {gone}: killed, or out of memory")
    return Failure(record.name, record.log, f"{who} died without an error of its own: killed, or out of memory")
