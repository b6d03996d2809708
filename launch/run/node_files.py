"""The files that the leader of a job and its supervisors exchange, in the attempt's folder on the shared file system.

    attempts/<n>/
        job.json                     leader: the job (`launch.slurm.job_facts.JobFacts`)
        expected.json                leader: expectations of every node (`launch.health.expected`)
        leader-beat                  leader: heartbeat
        nodes/<node>/hello.json      supervisor: its identity, address and block of ports
        nodes/<node>/preflight.json  supervisor: the findings on its node (`launch.health.check`)
        nodes/<node>/beat            supervisor: heartbeat
        placement.json ...           leader: the placement, for which the supervisors wait
        nodes/<node>/lost.json       supervisor: a process of its node died (`launch.run.components.report_lost`)
        terminated                   supervisors: touched when Slurm sends TERM to the step
        stacks-wanted                leader: requests the stacks of every node
        nodes/<node>/stacks.json     supervisor: the stacks of its node's processes (`launch.runtime.hang`)
        end                          leader: requests that every node end its processes
        nodes/<node>/aftermath.json  supervisor: the checks, repeated after a failure
        nodes/<node>/gone            supervisor: written last

Each file has one writer, who writes a temporary file, syncs and renames it. A file may become visible on another node
seconds later, so readers poll with a deadline and report what is missing. Nodes have their Slurm name, never the host
name, because simulated nodes share a host.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from launch import envvars
from launch.cluster.interfaces import job_address
from launch.files.shared import names_in, read_shared, write_atomically
from launch.ports import Ports
from launch.run.attempts import Attempt

BEAT_EVERY_S = 2.0
LOOKS_APART_S = 3 * BEAT_EVERY_S
OWN_SILENCE_S = 3 * BEAT_EVERY_S
BEHIND_S = 5 * BEAT_EVERY_S
"""A node whose last heartbeat is this much older than the others' failed first. Slurm notices only after
`SlurmdTimeout`, usually minutes."""
END, STACKS_WANTED, LEADER_BEAT, TERMINATED = "end", "stacks-wanted", "leader-beat", "terminated"


@dataclass(frozen=True)
class Hello:
    """The greeting of a supervisor."""

    node: str
    """Its Slurm name."""
    pid: int
    host: str
    address: str
    """IPv4 address in the job's network."""
    interface: str
    """Interface of the address."""
    ports: int
    """First port of the block that the supervisor holds on its node."""
    task: int
    """SLURM_PROCID."""
    cpus: int
    """Number of CPUs that it may use."""
    topology: str
    """Switches above the node, from the top: `core.spine1.leaf1.h100-001`; "" if Slurm has no topology."""
    topology_pattern: str
    at: float


@dataclass(frozen=True)
class NodeFiles:
    """The files of one node in an attempt."""

    attempt: Attempt
    node: str

    @property
    def folder(self) -> Path:
        return self.attempt.folder / "nodes" / self.node

    @property
    def beat(self) -> Path:
        return self.folder / "beat"

    @property
    def gone(self) -> Path:
        return self.folder / "gone"

    @property
    def log(self) -> Path:
        """Log of the node's supervisor."""
        return self.attempt.logs / f"supervisor-{self.node}.log"

    def failure(self) -> str | None:
        """The loss or failure that the supervisor reported."""
        report = read_shared(self.folder / "lost.json")
        return None if report is None else report["message"]

    def write_hello(self, hello: Hello) -> None:
        write_atomically(self.folder / "hello.json", json.dumps(asdict(hello), indent=1), durable=True)

    def hello(self) -> Hello | None:
        values = read_shared(self.folder / "hello.json")
        return None if values is None else Hello(**values)


def all_nodes(attempt: Attempt) -> list[NodeFiles]:
    """Every node that has a folder in this attempt."""
    return [NodeFiles(attempt, name) for name in names_in(attempt.folder / "nodes")]


def stamp(path: Path) -> float | None:
    """Time of a heartbeat file; None while it does not exist. The file is opened, so that an NFS client asks its
    server."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


class Beat:
    """Heartbeat: a thread that touches a file every `BEAT_EVERY_S` seconds, until `stop`."""

    def __init__(self, path: Path) -> None:
        self._path, self._ended = path, threading.Event()
        path.touch()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_EVERY_S):
            try:
                self._path.touch()
            except OSError:  # on a full or absent file system, the missing heartbeat is the report
                continue


class BeatWatch:
    """Detects missing heartbeats. A heartbeat counts when this process sees the file change, by its own clock, so that
    clocks of other machines do not matter.

    Only time in which the file system answers counts. While a file server fails over, all heartbeats stop for a minute
    or two, although no process is dead. Therefore two polls count as at most `LOOKS_APART_S` apart, and no time passes
    while a file cannot be read or this process's own heartbeat does not change.

    Args:
        own: this process's own heartbeat, written through the same file system.
    """

    def __init__(self, paths: Mapping[str, Path], own: Path | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._paths, self._own, self._clock = dict(paths), own, clock
        self.watched_s = 0.0
        """Counted time, in seconds."""
        self._looked = self._own_moved = clock()
        self._own_at: float | None = None
        self._seen: dict[str, tuple[float | None, float]] = {name: (None, 0.0) for name in paths}

    def look(self) -> None:
        """Read every heartbeat."""
        now = self._clock()
        since, self._looked = now - self._looked, now
        try:
            found = {name: stamp(path) for name, path in self._paths.items()}
            own = None if self._own is None else stamp(self._own)
        except OSError:
            return
        if own != self._own_at:
            self._own_at, self._own_moved = own, now
        if self._own is None or now - self._own_moved <= OWN_SILENCE_S:
            self.watched_s += min(since, LOOKS_APART_S)
        for name, at in found.items():
            if at is not None and at != self._seen[name][0]:
                self._seen[name] = (at, self.watched_s)

    def silent(self, seconds: float) -> list[str]:
        """Names whose heartbeat has not changed for this long."""
        return [name for name, (_, moved) in self._seen.items() if self.watched_s - moved > seconds]

    def not_since(self, moment: float) -> list[str]:
        """Names whose heartbeat has not changed since `watched_s` was `moment`."""
        return [name for name, (_, moved) in self._seen.items() if moved <= moment]

    def most(self, names: Collection[str]) -> bool:
        """Whether these are more than half of several names. Then the cause is the file system or network, not
        nodes."""
        return len(names) > 1 and 2 * len(names) > len(self._paths)


def vanished(attempt: Attempt) -> list[str]:
    """Nodes of a silently died attempt that failed first: their last heartbeat is `BEHIND_S` older than the newest one
    of all nodes and the leader. [] if all stopped together."""
    stamps = {each.node: at for each in all_nodes(attempt) if (at := stamp(each.beat)) is not None}
    latest = max([*stamps.values(), stamp(attempt.folder / LEADER_BEAT) or 0.0])
    gone = [node for node, at in stamps.items() if latest - at > BEHIND_S]
    return gone if len(gone) < len(stamps) else []


def greeting(node: str, ports: Ports) -> Hello:
    """The greeting of this process, which holds `ports` on the node with the Slurm name `node`."""
    where = job_address(envvars.get(envvars.INTERFACE))
    return Hello(
        node=node, pid=os.getpid(), host=socket.gethostname(), address=where.address, interface=where.interface,
        ports=ports.base, task=int(envvars.get("SLURM_PROCID", "0")), cpus=len(os.sched_getaffinity(0)),
        topology=envvars.get("SLURM_TOPOLOGY_ADDR", ""),
        topology_pattern=envvars.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""), at=time.time())
