"""The one module that runs other processes. It ends them by PID, after their children are known, never by name."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from launch import envvars
from launch.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded here, not in the child: between fork and exec only async-signal-safe work is sound."""


@dataclass(frozen=True)
class Child:
    """A process started by this module, the leader of its own session."""

    name: str
    popen: subprocess.Popen
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the number of the signal that ended it; None while it runs."""
        return self.popen.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait at most `timeout_s` for the end. Returns the exit status, or None if the process still runs."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone. Does nothing if it has ended."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def end(self, grace_s: float = 10.0) -> list[int]:
        """End the process, its descendants and the rest of its session: TERM, then KILL after `grace_s`.
        Returns the PIDs that had to be killed."""
        killed = end_processes(_tree(self.pid), grace_s)
        self.popen.wait()
        return killed


def start(name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str], cwd: Path | None = None,
          dies_with_parent: signal.Signals | None = signal.SIGTERM) -> Child:
    """Start a process in its own session (Ctrl-C in the terminal does not reach it) and append its output to `log`.

    Args:
        environment: the whole environment of the child, see `launch.envvars`.
        dies_with_parent: signal that the kernel sends when the *thread* that called this function ends for any reason,
            so call it from the main thread. None: the child outlives its parent. SIGKILL replaces a signal that is
            blocked here, because the child inherits the mask.

    Raises:
        UserError: the program does not exist or may not be executed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()
    if dies_with_parent in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        dies_with_parent = signal.SIGKILL

    def before_exec() -> None:
        if dies_with_parent is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, int(dies_with_parent), 0, 0, 0)
            if os.getppid() != parent:  # the parent died before the kernel registered the request
                os._exit(1)

    with log.open("ab") as output:
        try:
            popen = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                     env=dict(environment), cwd=cwd, start_new_session=True, preexec_fn=before_exec)
        except (FileNotFoundError, PermissionError) as error:
            raise UserError(f"cannot start {name}: {error.strerror}: {error.filename}", where=str(log),
                            fix="install it, or correct the path") from error
    return Child(name, popen, log)


def output_of(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None,
              cwd: Path | None = None, own_session: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a short command to its end and return its status and output. The caller judges the status.

    Args:
        own_session: Ctrl-C in a terminal does not reach the command.
    Raises:
        UserError: the program does not exist, or runs longer than `timeout_s`.
    """
    try:
        return subprocess.run(list(command), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=timeout_s, cwd=cwd, check=False, start_new_session=own_session,
                              env=None if environment is None else dict(environment))
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}", fix="install it, or correct PATH") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{' '.join(command)} gave no answer within {timeout_s:g} s",
                        fix="run it by hand to see what it waits for") from error


def run(command: Sequence[str], *, environment: Mapping[str, str] | None = None,
        cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a command in the foreground on this terminal, to its end. The caller judges the status.

    Raises:
        UserError: the program does not exist.
    """
    try:
        return subprocess.run(list(command), env=None if environment is None else dict(environment), cwd=cwd,
                              check=False)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}", fix="install it, or correct PATH") from error


def over_cores(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`[function(item) for item in items]`, spread over one process per available core. Function, items and results
    must pickle. An exception in a process is raised here."""
    cores = min(len(os.sched_getaffinity(0)), len(items))
    if cores <= 1:
        return [function(item) for item in items]
    from concurrent.futures import ProcessPoolExecutor  # here, because importing multiprocessing is slow
    with ProcessPoolExecutor(cores) as pool:
        return list(pool.map(function, items))


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> list[int]:
    """Send TERM to all processes, KILL to those left after `grace_s`, and wait until they have ended. Returns the PIDs
    that were killed.

    Descendants that appear in the meantime are ended too.
    """
    own = os.getpid()
    targets = {process for process in processes if process.pid != own}
    for process in targets:
        _send(process, signal.SIGTERM)
    alive = still_running(targets, grace_s)
    late = {child for process in alive for child in _children(process)}
    killed = sorted({process.pid for process in (*alive, *late)})
    for process in (*alive, *late):
        _send(process, signal.SIGKILL)
    still_running((*alive, *late), timeout_s=10.0)
    return killed


def still_running(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait at most `timeout_s` until all have ended. Returns those that have not.

    Waits on pidfds, which does not reap: `psutil.wait_procs` would take the exit status of our own children from their
    `Popen`, which would then report 0.
    """
    poller, waiting = select.poll(), {}
    try:
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            waiting[descriptor] = process
            poller.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        alive = {descriptor for descriptor, process in waiting.items() if process.is_running()}  # not a reused pid
        while alive:
            ended = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ended:
                break
            for descriptor, _ in ended:
                poller.unregister(descriptor)
                alive.discard(descriptor)
        return [waiting[descriptor] for descriptor in alive]
    finally:
        for descriptor in waiting:
            os.close(descriptor)


def marked(job: str, node: str | None = None, component: str | None = None) -> list[psutil.Process]:
    """Every live process of a job, found by the mark in its initial environment. This includes processes that have left
    their parent's tree or session, as Ray's and vLLM's daemons do, but not this process and its ancestors.

    Args:
        node: only processes of this node of the job. Simulated nodes share a host, and each ends only its own.
        component: only a component's processes with this name, and those that they started.
    """
    skip = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in skip:
            continue
        try:
            variables = process.environ()
            if (variables.get(envvars.JOB_MARK) == job and node in (None, variables.get(envvars.NODE))
                    and component in (None, variables.get(envvars.COMPONENT))
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process)
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
    return found


def describe(process: psutil.Process) -> str:
    """`pid 123: python -m megatron_rl...`, for messages."""
    try:
        return f"pid {process.pid}: {' '.join(process.cmdline())[:120] or process.name()}"
    except psutil.Error:
        return f"pid {process.pid}: has ended"


def _tree(pid: int) -> set[psutil.Process]:
    """The process, its descendants, and the members of its session, which may have lost their parents."""
    tree: set[psutil.Process] = set()
    try:
        leader = psutil.Process(pid)
    except psutil.NoSuchProcess:
        leader = None
    if leader is not None:
        tree |= {leader, *_children(leader)}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid:
                tree |= {process, *_children(process)}
        except OSError:  # the process has ended in the meantime
            continue
    return tree


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass  # it has already ended
