"""A real Slurm with simulated GPU nodes on this machine, for tests: munged, slurmctld and one slurmd a node, all in
the foreground as our children, all files in one private folder. Needs no root.

    with running([Group("h100", 32)], topology) as slurm:
        job = slurm.submit("--nodes=4", "script.sh")
        slurm.wait_for(job, "RUNNING")
        slurm.kill_node("h100-003")

The packages come from `tests/install_slurm.sh`, which `make test` runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from launch import envvars, processes
from tests.patience import patient
from tests.slurm_accounting import Accounting
from tests.slurm_conf import Group, gres_conf, slurm_conf

__all__ = ["REPOSITORY", "Group", "SlurmCluster", "missing_programs", "requires_slurm", "running"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo")
SBIN = ("/usr/sbin", "/sbin")
REPOSITORY = Path(__file__).resolve().parent.parent
FOREIGN = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SINFO", "SQUEUE", "SCONTROL", "MEGATRON_RL")
"""Variables of another Slurm, or of a job that runs the tests."""
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
                   "OUT_OF_MEMORY"})
"""NODE_FAIL is not among them: Slurm itself requeues such a job."""

requires_slurm = pytest.mark.slurm
"""Skipped where Slurm is not installed, and failed in CI: see tests/conftest.py."""


def missing_programs() -> list[str]:
    path = os.pathsep.join([os.environ.get("PATH", ""), *SBIN])
    return [name for name in PROGRAMS if not shutil.which(name, path=path)]


@contextmanager
def running(groups: Sequence[Group], topology: str = "", settings: str = "",
            accounting: bool = False) -> Iterator[SlurmCluster]:
    """A cluster for the length of a `with`, its files in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:   # short: the path of a socket has 107 characters
        cluster = SlurmCluster(Path(folder), groups, topology, settings, accounting)
        try:
            yield cluster.start()
        finally:
            cluster.stop()


class SlurmCluster:
    """Daemons, nodes and jobs of one cluster. `running` starts and stops it.

    Args:
        folder: private folder for configuration, state, sockets and logs.
        groups: the nodes.
        topology: text of topology.conf; empty for a flat network.
        settings: further lines of slurm.conf.
        accounting: with a slurmdbd and its database, so that sacct answers.
    """

    def __init__(self, folder: Path, groups: Sequence[Group], topology: str = "", settings: str = "",
                 accounting: bool = False) -> None:
        self.folder, self.groups, self.topology = folder, tuple(groups), topology
        self.settings = settings
        self.accounting = Accounting(folder) if accounting else None
        if self.accounting is not None:
            self.settings = f"{self.settings}\n{self.accounting.settings}"
        self.names = [name for group in groups for name in group.names]
        self.daemons: dict[str, processes.Child] = {}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        search = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), *SBIN]
        self.environment["PATH"] = os.pathsep.join(search)
        self.environment["SLURM_CONF"] = str(folder / "etc/slurm.conf")
        self.environment[envvars.SIMULATED_GPUS] = str(folder / "etc/gpus.json")     # what preflight finds on the nodes

    # the cluster

    def start(self, timeout_s: float = 60.0) -> SlurmCluster:
        """Start every daemon and wait until all nodes are idle."""
        deadline = time.monotonic() + patient(timeout_s)
        self._write_files()
        munge, conf = self.folder / "munge", self.environment["SLURM_CONF"]
        self._daemon("munged", "munged", "--foreground", "--force", f"--key-file={munge}/key",
                     f"--socket={munge}/socket", f"--pid-file={munge}/pid", f"--log-file={munge}/log",
                     f"--seed-file={munge}/seed", "--num-threads=2")
        self._wait((munge / "socket").exists, "munge's socket", deadline)
        if self.accounting is not None:
            self.accounting.start(self.environment, self._daemon, self._wait, deadline)
        self._daemon("slurmctld", "slurmctld", "-D", "-c", "-f", conf)
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.states().count("idle") == len(self.names), "all nodes to be idle", deadline)
        return self

    def run(self, *command: str, check: bool = True, timeout_s: float = 30.0, cwd: Path = REPOSITORY,
            variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster: one of Slurm's, or the launcher.

        Args:
            check: fail unless it ends with status 0.
            variables: on top of the environment, which holds no variable of another Slurm.
        """
        answer = processes.output_of(command, timeout_s=patient(timeout_s), cwd=cwd,
                                     environment={**self.environment, **(variables or {})})
        if check and answer.returncode:
            raise AssertionError(f"{' '.join(command)}: status {answer.returncode}\n{answer.stdout}{answer.stderr}")
        return answer

    def stop(self) -> None:
        """End jobs, nodes, the controller and munge, in this order, by their pids; fails if anything is left."""
        nodes = [self.daemons[name] for name in self.names if name in self.daemons]
        processes.end_processes([psutil.Process(child.pid) for child in nodes if child.returncode is None], grace_s=5.0)
        self._kill(lambda: self._on_nodes(self.names))
        for name in list(reversed(self.daemons)):
            self.daemons.pop(name).end(grace_s=5.0)
        left = [processes.describe(process) for process in self._ours()]
        assert not left, f"left running: {left}"

    # nodes

    def start_node(self, name: str) -> None:
        self._daemon(name, "slurmd", "-D", "-N", name, "-f", self.environment["SLURM_CONF"])

    def kill_node(self, name: str) -> None:
        """A power cut: slurmd, its step daemons and their tasks are gone. Slurm notices after two pings without an
        answer, half a minute later, unless it is told (`mark_down`)."""
        daemon = self.daemons.pop(name)
        daemon.signal(signal.SIGKILL)
        daemon.wait(5.0)
        self._kill(lambda: self._on_nodes([name]))

    def mark_down(self, name: str) -> None:
        """Tell Slurm that a node is dead, as a health check or an administrator does. It ends the node's jobs."""
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=dead")

    def revive_node(self, name: str, timeout_s: float = 30.0) -> None:
        """Start a killed node again and wait until it can take jobs."""
        self.start_node(name)
        self._wait(lambda: self.state_of(name) in ("idle", "mixed", "allocated"), f"{name} to be up",
                   time.monotonic() + patient(timeout_s))

    def states(self) -> list[str]:
        """State of every node; [] while the controller does not answer."""
        return list(self._states().values())

    def state_of(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--nodes", node, "--format=%T").stdout.split()[0]

    def tasks(self, node: str) -> list[psutil.Process]:
        """What jobs run on a node, by the environment it was started with."""
        return [process for process, environment in self._with_environment()
                if environment.get("SLURMD_NODENAME") == node and process.name() != "slurmd"]

    # jobs

    def submit(self, *arguments: str, cwd: Path = REPOSITORY, variables: Mapping[str, str] | None = None) -> int:
        """`sbatch`; returns the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, cwd=cwd, variables=variables).stdout.split(";")[0])

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says of it: JobState, Reason, NodeList, Restarts, ExitCode, StdOut ..."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(job)).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def output(self, job: int) -> str:
        """What the job has written so far."""
        path = Path(self.job(job)["StdOut"])
        return path.read_text(errors="replace") if path.is_file() else ""

    def wait_for(self, job: int, *states: str, timeout_s: float = 60.0, restarts: int | None = None) -> dict[str, str]:
        """Wait until a job is in one of `states` (and has been requeued `restarts` times); returns `job(job)`.

        Fails when the job has ended otherwise or time is up, with the end of its output.
        """
        deadline = time.monotonic() + patient(timeout_s)
        while True:
            found = self.job(job)
            if found["JobState"] in states and restarts in (None, int(found["Restarts"])):
                return found
            wrong_end = found["JobState"] in ENDED and found["JobState"] not in states
            if wrong_end or time.monotonic() > deadline:
                raise AssertionError(
                    f"job {job} is {found['JobState']} ({found['Reason']}, exit {found['ExitCode']}, restarts "
                    f"{found['Restarts']}), not {' or '.join(states)} within {patient(timeout_s):.0f} s; its output "
                    f"ends:\n"
                    f"{self.output(job)[-4000:]}")
            time.sleep(0.1)  # between two looks at the condition

    def wait_until(self, done: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Wait for anything; fails at the deadline, or when a daemon has ended."""
        self._wait(done, what, time.monotonic() + patient(timeout_s))

    def jobs(self) -> list[int]:
        """Jobs that wait or run."""
        return [int(word) for word in self.run("squeue", "--noheader", "--format=%A").stdout.split()]

    def reset(self, keep: Sequence[int] = (), timeout_s: float = 60.0) -> None:
        """Cancel every job but `keep`, bring nodes back, wait until those that run no kept job are idle."""
        if wrong := [str(job) for job in self.jobs() if job not in keep]:
            self.run("scancel", "--full", "--signal=KILL", *wrong, check=False)
            self.run("scancel", *wrong, check=False)
        for name in self.names:
            if name not in self.daemons or self.daemons[name].returncode is not None:
                self.daemons.pop(name, None)
                self.start_node(name)
        unfit = [name for name, state in self._states().items() if state.startswith(("drain", "down", "drng", "fail"))]
        if unfit:
            self.run("scontrol", "update", f"nodename={','.join(unfit)}", "state=resume", check=False)
        good = {"idle", "allocated", "mixed"} if keep else {"idle"}
        self._wait(lambda: set(self.states()) <= good and sorted(self.jobs()) == sorted(keep), "a clean cluster",
                   time.monotonic() + patient(timeout_s))

    # processes

    def _states(self) -> dict[str, str]:
        """By node: sinfo has a line for each partition that a node is in."""
        answer = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        return dict(line.split() for line in answer.stdout.splitlines()) if answer.returncode == 0 else {}

    def _on_nodes(self, names: Sequence[str]) -> list[psutil.Process]:
        """Step daemons, which rewrite their title and environment, by their sockets; then the tasks."""
        sockets = {str(path) for name in names for path in (self.folder / "spool" / name).glob(f"{name}_*.*")}
        daemons = {each.pid for each in psutil.net_connections("unix") if each.laddr in sockets and each.pid}
        found = [psutil.Process(pid) for pid in daemons if psutil.pid_exists(pid)]
        wanted = set(names)
        own = {child.pid for child in self.daemons.values()}
        return found + [process for process, environment in self._with_environment()
                        if environment.get("SLURMD_NODENAME") in wanted and process.pid not in own | daemons]

    def _with_environment(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """Live processes that were started with our SLURM_CONF."""
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] \
                        and process.status() != psutil.STATUS_ZOMBIE:
                    yield process, environment
            except psutil.Error:    # it has ended, or belongs to another user: not ours
                continue

    def _ours(self) -> list[psutil.Process]:
        return self._on_nodes(self.names) + [process for process, _ in self._with_environment()]

    def _kill(self, find: Callable[[], Iterable[psutil.Process]], timeout_s: float = 10.0) -> None:
        """KILL what `find` finds, until it finds nothing: a process that is killed may just have started another. All
        are stopped first, as in a power cut: nobody lives to tell of the death of another."""
        deadline = time.monotonic() + patient(timeout_s)
        while victims := list(find()):
            for end in (psutil.Process.suspend, psutil.Process.kill):
                for process in victims:
                    with suppress(psutil.NoSuchProcess):
                        end(process)
            processes.still_running(victims, timeout_s=2.0)
            assert time.monotonic() < deadline, f"still there: {[processes.describe(each) for each in victims]}"

    def _daemon(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program, f"{command[0]} is not installed"
        self.daemons[name] = processes.start(name, [program, *command[1:]], log=self.folder / f"log/{name}.log",
                                             environment=self.environment)

    def _wait(self, done: Callable[[], bool], what: str, deadline: float) -> None:
        while not done():
            dead = [name for name, child in list(self.daemons.items()) if child.returncode is not None]
            if dead or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}; ended: {dead or 'nothing'}\n{self._logs(dead)}")
            time.sleep(0.05)  # between two looks at the condition

    def _logs(self, dead: Sequence[str]) -> str:
        """What the daemons that ended say; else the controller and the first node that is not idle, with its state."""
        unfit = {name: state for name, state in self._states().items() if state != "idle"}
        names = [*dead[:2]] or ["slurmctld", *list(unfit)[:1]]
        parts = [f"not idle: {unfit or 'none'}"]
        for name in names:
            log = self.folder / f"log/{name}.log"
            parts.append(f"{name} says:\n" + (log.read_text(errors="replace")[-2000:] if log.exists() else "(no log)"))
        return "\n".join(parts)

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
        (etc / "gpus.json").write_text(json.dumps({"nodes": {
            name: {"count": group.gpus if group.gpu else 0} for group in self.groups for name in group.names}}))
        (etc / "plugstack.conf").write_text("")
        (etc / "gres.conf").write_text(gres_conf(self.groups, self.folder / "dev"))
        if self.topology:
            (etc / "topology.conf").write_text(self.topology)
        (etc / "slurm.conf").write_text(slurm_conf(self.folder, self.groups, tree=bool(self.topology),
                                                   settings=self.settings))
