"""The processes of an attempt as they describe themselves: their identity, their log and their first error.

Each process writes `components/<node>/<name>.json` when it starts and `errors/<name>.json` when it fails. The launcher
reads these files and does not ask Ray, so that it also works when Ray is down. A pid is valid only on its own node: in
a job on several nodes, each supervisor judges its own processes and reports losses in `nodes/<node>/lost.json`.

The driver may continue without a rollout engine. It then moves the record of that process to `dismissed/`: from there
on, neither its death nor its errors end the attempt or explain its end.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from launch import shared_memory
from launch.files.shared import names_in, patiently, read_shared, seen, write_atomically
from launch.files.waiting import wait_for
from launch.run.attempts import Attempt

NO_NODE = "-"
"""Folder of components started outside a job."""
DISMISSED = "dismissed"
"""Folder of the processes that the driver continued without."""


@dataclass(frozen=True)
class Pid:
    """A process of this node: its pid, and its creation time, which distinguishes it from a reused pid."""

    pid: int
    started: float

    @staticmethod
    def of(process: psutil.Process) -> Pid:
        return Pid(process.pid, process.create_time())

    def alive(self) -> bool:
        """Whether this process is still running (a zombie is not)."""
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
    """One component of the attempt: its process, and the child processes that it needs."""

    name: str
    """`driver`, `trainer-3`, `rollout-0`, `reward-0`."""
    process: Pid
    node: str
    """Node on which the pids are valid."""
    log: str
    needs: tuple[Pid, ...] = ()
    """Processes that a library started for it: vLLM's engine core and workers."""
    segments: tuple[str, ...] = ()
    """Shared memory that these processes hold, see `launch.shared_memory`."""

    def alive(self) -> bool:
        return self.process.alive() and all(each.alive() for each in self.needs)


_RECORD = TypeAdapter(ComponentRecord)


@dataclass(frozen=True)
class ErrorRecord:
    """The first uncaught exception of a component."""

    name: str
    time: float
    summary: str
    """Last line of the traceback."""
    traceback: str
    user_error: bool = False
    pid: int = 0
    """The process that failed."""


def register(attempt: Attempt, name: str, node: str) -> ComponentRecord:
    """Register a component. Called once by the component itself when it starts."""
    record = ComponentRecord(name, Pid.of(psutil.Process()), node, str(attempt.logs / f"{name}.log"))
    _write(attempt, record)
    return record


def register_children(attempt: Attempt, record: ComponentRecord) -> ComponentRecord:
    """Register the children that a component needs. Called by the component itself when all of them are running."""
    children = psutil.Process().children(recursive=True)
    held = shared_memory.held([os.getpid(), *(child.pid for child in children)])
    record = replace(record, needs=tuple(Pid.of(child) for child in children), segments=tuple(sorted(held)))
    _write(attempt, record)
    return record


def _write(attempt: Attempt, record: ComponentRecord) -> None:
    """Write the component's file. Each node has its own folder, so that a supervisor reads only its own."""
    path = _path(attempt, record)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(record)))


def _path(attempt: Attempt, record: ComponentRecord) -> Path:
    return attempt.folder / "components" / (record.node or NO_NODE) / f"{record.name}.json"


def record_error(attempt: Attempt, name: str, summary: str, traceback: str, *, user_error: bool = False,
                 pid: int | None = None) -> None:
    """Record the error of a component that fails. Only its first error counts.

    Args:
        pid: the process that failed, if it is not this one.
    """
    path = attempt.folder / "errors" / f"{name}.json"
    if not seen(path) or not any(error.name == name for error in errors(attempt)):
        error = ErrorRecord(name, time.time(), summary, traceback, user_error, pid or os.getpid())
        write_atomically(path, json.dumps(asdict(error)))


def dismiss(attempt: Attempt, name: str) -> None:
    """Record that the driver continues without the current process of a component, if there is one."""
    folder = attempt.folder / DISMISSED
    folder.mkdir(exist_ok=True)
    for record in components(attempt):
        if record.name == name:
            os.replace(_path(attempt, record), folder / _process(name, record.process.pid))


def dismissed(attempt: Attempt) -> list[ComponentRecord]:
    """All dismissed processes."""
    folder = attempt.folder / DISMISSED
    found = [read_shared(folder / name, _RECORD.validate_json) for name in names_in(folder, ".json")]
    return [record for record in found if record is not None]


def was_dismissed(attempt: Attempt, name: str, pid: int | None) -> bool:
    """Whether the driver continued without this process."""
    return seen(attempt.folder / DISMISSED / _process(name, pid))


def _process(name: str, pid: int | None) -> str:
    """The file name of a dismissed process."""
    return f"{name}-{pid}.json"


def components(attempt: Attempt, node: str | None = None) -> list[ComponentRecord]:
    """All components of the attempt, or of one node, by name."""
    folder = attempt.folder / "components"
    nodes = names_in(folder) if node is None else [node or NO_NODE]
    found = [read_shared(folder / each / name, _RECORD.validate_json)
             for each in nodes for name in names_in(folder / each, ".json")]
    return sorted((record for record in found if record is not None), key=lambda record: record.name)


class NodeComponents:
    """The components of one node. Files are read again only if they have changed, because the supervisors of all nodes
    poll every second, for days."""

    def __init__(self, attempt: Attempt, node: str) -> None:
        self._folder = attempt.folder / "components" / node
        self._known: dict[str, tuple[int, ComponentRecord]] = {}
        """File -> (its inode, which changes when the file is replaced; its content)."""

    def look(self) -> list[ComponentRecord]:
        """All components registered so far."""
        try:
            inodes = patiently(lambda: {entry.name: entry.inode() for entry in os.scandir(self._folder)
                                        if entry.name.endswith(".json") and not entry.name.startswith(".")})
        except FileNotFoundError:
            return []
        self._known = {name: known for name, known in self._known.items() if name in inodes}
        for name, inode in inodes.items():
            if self._known.get(name, (None,))[0] != inode:
                record = read_shared(self._folder / name, _RECORD.validate_json)
                if record is not None:
                    self._known[name] = (inode, record)
        return [record for _, (_, record) in sorted(self._known.items())]


def component(attempt: Attempt, name: str) -> ComponentRecord:
    """The record of one component."""
    return next(record for record in components(attempt) if record.name == name)


def dead(attempt: Attempt, node: str) -> list[ComponentRecord]:
    """The components of `node`, which must be this node, that are no longer running, except the driver."""
    return [record for record in components(attempt, node) if record.name != "driver" and not record.alive()]


def errors(attempt: Attempt) -> list[ErrorRecord]:
    """All recorded errors, oldest first, without those of dismissed processes."""
    folder, gone = attempt.folder / "errors", names_in(attempt.folder / DISMISSED, ".json")
    found = [ErrorRecord(**values) for name in names_in(folder, ".json") if (values := read_shared(folder / name))]
    return sorted((error for error in found if _process(error.name, error.pid) not in gone),
                  key=lambda error: error.time)


@dataclass(frozen=True)
class Failure:
    """The cause of a failed attempt, for its outcome."""

    component: str
    log: str
    message: str
    user_error: bool = False
    """Whether the user can fix it: configuration, model, data or reward."""
    pid: int | None = None
    """The process of a component."""


def report_lost(attempt: Attempt, node: str, failure: Failure) -> None:
    """Report that a process on `node` has died. Called by the node's supervisor. Only its first report counts, unless
    the driver has dismissed that process."""
    path = attempt.folder / "nodes" / node / "lost.json"
    told = read_shared(path)
    if told is None or was_dismissed(attempt, told["component"], told.get("pid")):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({**asdict(failure), "time": time.time()}), durable=True)


def lost(attempt: Attempt) -> list[Failure]:
    """Losses reported by the supervisors of all nodes, without dismissed processes. Components that died silently come
    first, because errors of other components may only be caused by a closed connection; then the oldest."""
    folder, gone = attempt.folder / "nodes", names_in(attempt.folder / DISMISSED, ".json")
    reports = [report for report in (read_shared(folder / node / "lost.json") for node in names_in(folder))
               if report and _process(report["component"], report.get("pid")) not in gone]
    talked = _talked(attempt)
    return [Failure(**{name: value for name, value in report.items() if name != "time"})
            for report in sorted(reports, key=lambda report: (report["component"] in talked, report["time"]))]


def silently_lost(attempt: Attempt) -> list[Failure]:
    """Failures in `lost` whose component recorded no error."""
    talked = _talked(attempt)
    return [failure for failure in lost(attempt) if failure.component not in talked]


def await_silently_lost(attempt: Attempt, within_s: float) -> None:
    """Give the supervisors of other nodes time to report a death. The driver notices a death through a closed
    connection at the same time as they do, and then knows only which component noticed it."""
    wait_for(lambda: [] if silently_lost(attempt) else ["a supervisor"], "to report a death", within_s,
             say=lambda line: None)


def _talked(attempt: Attempt) -> set[str]:
    return {error.name for error in errors(attempt)}


def first_failure(attempt: Attempt, node: str) -> Failure:
    """The cause of a failure, as visible from `node` and from the reports of other nodes' supervisors. Call this while
    the other processes are still running.

    An error that the user can fix explains all later ones. Otherwise a process that died silently comes before the
    errors of its peers, which only see a closed connection; then the earliest error of a component; then the driver's
    error.
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
    """The failure of a component that died without recording an error."""
    who = f"{record.name} (pid {record.process.pid}, node {record.node})"
    if record.process.alive():
        gone = next(each.pid for each in record.needs if not each.alive())
        why = f"lost its process {gone}"
    else:
        why = "died without an error of its own"
    return Failure(record.name, record.log, f"{who} {why}: killed, or out of memory", pid=record.process.pid)
