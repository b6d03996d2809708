"""A real Slurm with simulated GPU nodes on this machine, for tests: munged, slurmctld and one slurmd a node, all in
the foreground as our children, all files in one private folder. Needs no root.

The packages come from `tests/install_slurm.sh`, which `make test` runs.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launch import processes
from tests.conftest import NO_SLURM

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo")
SBIN = ("/usr/sbin", "/sbin")
PORTS = range(20000, 31000)
"""Below the kernel's ephemeral ports: a free block stays free until the daemons have it."""


def missing_programs() -> list[str]:
    path = os.pathsep.join([os.environ.get("PATH", ""), *SBIN])
    return [name for name in PROGRAMS if not shutil.which(name, path=path)]


requires_slurm = pytest.mark.skipif(bool(missing_programs()), reason=NO_SLURM)


@dataclass(frozen=True)
class Group:
    """Nodes of one kind: `prefix-001` ... with GPUs that Slurm believes in."""

    prefix: str
    count: int
    gpu: str | None = "h100"
    """Type in the gres; None gives nodes without GPUs."""
    gpus: int = 8
    partition: str = "batch"

    @property
    def names(self) -> list[str]:
        return [f"{self.prefix}-{number:03d}" for number in range(1, self.count + 1)]

    @property
    def hostlist(self) -> str:
        return f"{self.prefix}-[001-{self.count:03d}]"

    @property
    def gres(self) -> str:
        return f"gpu:{self.gpu}:{self.gpus}"


@contextmanager
def running(groups: Sequence[Group], topology: str = "", settings: str = "") -> Iterator[SlurmCluster]:
    """A cluster for the length of a `with`, its files in a folder that goes with it.

    with running([Group("h100", 32)]) as slurm:
        slurm.run("sinfo")
    """
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:   # short: the path of a socket has 107 characters
        cluster = SlurmCluster(Path(folder), groups, topology, settings)
        try:
            yield cluster.start()
        finally:
            cluster.stop()


class SlurmCluster:
    """Configuration, daemons and commands of one cluster. `running` starts and stops it.

    Args:
        folder: private folder for configuration, state, sockets and logs.
        groups: the nodes.
        topology: text of topology.conf; empty for a flat network.
        settings: further lines of slurm.conf.
    """

    def __init__(self, folder: Path, groups: Sequence[Group], topology: str = "", settings: str = "") -> None:
        self.folder, self.groups, self.topology, self.settings = folder, tuple(groups), topology, settings
        self.names = [name for group in groups for name in group.names]
        self.daemons: dict[str, processes.Child] = {}
        foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE", "SCONTROL")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *SBIN])
        self.environment["SLURM_CONF"] = str(folder / "etc/slurm.conf")

    def start(self, timeout_s: float = 60.0) -> SlurmCluster:
        """Start every daemon and wait until all nodes are idle."""
        deadline = time.monotonic() + timeout_s
        self._write_files()
        munge, conf = self.folder / "munge", self.environment["SLURM_CONF"]
        self._daemon("munged", "munged", "--foreground", "--force", f"--key-file={munge}/key",
                     f"--socket={munge}/socket", f"--pid-file={munge}/pid", f"--log-file={munge}/log",
                     f"--seed-file={munge}/seed", "--num-threads=2")
        self._wait((munge / "socket").exists, "munge's socket", deadline)
        self._daemon("slurmctld", "slurmctld", "-D", "-c", "-f", conf)
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.states().count("idle") == len(self.names), "all nodes to be idle", deadline)
        return self

    def start_node(self, name: str) -> None:
        self._daemon(name, "slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])

    def states(self) -> list[str]:
        """State of every node; [] while the controller does not answer."""
        answer = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return answer.stdout.split() if answer.returncode == 0 else []

    def run(self, *command: str, check: bool = True, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands against this cluster."""
        answer = processes.output_of(command, timeout_s=timeout_s, environment=self.environment)
        if check and answer.returncode:
            raise AssertionError(f"{' '.join(command)}: status {answer.returncode}\n{answer.stdout}{answer.stderr}")
        return answer

    def stop(self) -> None:
        """End the nodes, the controller and munge, in this order, by their pids."""
        last = [self.daemons.pop(name) for name in ("slurmctld", "munged") if name in self.daemons]
        processes.end_processes([psutil.Process(child.pid) for child in self.daemons.values()
                                 if child.returncode is None], grace_s=5.0)
        for child in (*self.daemons.values(), *last):
            child.end(grace_s=5.0)
        self.daemons.clear()

    def _daemon(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program, f"{command[0]} is not installed"
        self.daemons[name] = processes.start(name, [program, *command[1:]], log=self.folder / f"log/{name}.log",
                                             environment=self.environment)

    def _wait(self, done: Callable[[], bool], what: str, deadline: float) -> None:
        while not done():
            dead = [name for name, child in self.daemons.items() if child.returncode is not None]
            if dead or time.monotonic() > deadline:
                name = dead[0] if dead else "slurmctld"
                log = self.folder / f"log/{name}.log"
                tail = log.read_text(errors="replace")[-2000:] if log.exists() else "(no log)"
                raise AssertionError(f"waited for {what}; ended: {dead or 'nothing'}; {name} says:\n{tail}")
            time.sleep(0.05)  # between two looks at the condition

    def _write_files(self) -> None:
        for name in ("etc", "munge", "state", "spool", "log", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o755)
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for number in range(max(group.gpus for group in self.groups)):
            device = self.folder / f"dev/nvidia{number}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")  # a character device, or jobs get no CUDA_VISIBLE_DEVICES
        etc = self.folder / "etc"
        (etc / "plugstack.conf").write_text("")
        (etc / "gres.conf").write_text("".join(
            f"NodeName={group.hostlist} Name=gpu Type={group.gpu} File={self.folder}/dev/nvidia[0-{group.gpus - 1}]\n"
            for group in self.groups if group.gpu))
        if self.topology:
            (etc / "topology.conf").write_text(self.topology)
        (etc / "slurm.conf").write_text(self._slurm_conf())

    def _slurm_conf(self) -> str:
        me, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname().split(".")[0]
        port = free_block(len(self.names) + 1)
        lines = [
            "ClusterName=sim", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={port}",
            f"SlurmUser={me}", f"SlurmdUser={me}",
            "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/munge/socket,cred_expire=5", "CredType=cred/munge",
            f"StateSaveLocation={self.folder}/state", f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"SlurmctldPidFile={self.folder}/spool/slurmctld.pid", f"SlurmdPidFile={self.folder}/spool/%n.pid",
            f"PlugStackConfig={self.folder}/etc/plugstack.conf", "MailProg=/bin/true",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none", "MpiDefault=none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "GresTypes=gpu",
            f"TopologyPlugin=topology/{'tree' if self.topology else 'none'}", "SlurmdParameters=config_overrides",
            "ReturnToService=1", "JobRequeue=1", "EnforcePartLimits=ALL", "KillWait=5", "MinJobAge=3600",
            "SlurmdTimeout=10", "SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=100000",
            self.settings]
        first = port + 1
        for group in self.groups:
            gres = f" Gres={group.gres}" if group.gpu else ""
            lines.append(f"NodeName={group.hostlist} NodeHostname={host} NodeAddr=127.0.0.1 "
                         f"Port=[{first}-{first + group.count - 1}] Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 "
                         f"RealMemory=2000000{gres} State=UNKNOWN")
            first += group.count
        for number, partition in enumerate(dict.fromkeys(group.partition for group in self.groups)):
            nodes = ",".join(group.hostlist for group in self.groups if group.partition == partition)
            lines.append(f"PartitionName={partition} Nodes={nodes} Default={'NO' if number else 'YES'} "
                         "DefaultTime=30:00 MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"


def free_block(size: int) -> int:
    """First of `size` neighbouring TCP ports that nobody uses; where the search begins depends on our pid, so that
    two clusters that start together do not meet."""
    starts = list(PORTS)[::size]
    shift = os.getpid() % len(starts)
    for base in starts[shift:] + starts[:shift]:
        held: list[socket.socket] = []
        try:
            for port in range(base, base + size):
                held.append(socket.socket())
                held[-1].bind(("0.0.0.0", port))
            return base
        except OSError:
            continue
        finally:
            for each in held:
                each.close()
    raise AssertionError(f"no {size} free ports in a row between {PORTS.start} and {PORTS.stop}")
