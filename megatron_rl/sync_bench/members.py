"""Processes that each hold one object and take calls of its methods over a pipe. Every wait has a deadline.

They fork from one server that has imported what they need, so sixteen of them start in seconds. A process may run in a
network namespace (Linux, as root): then all its traffic uses the interfaces there.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps namespaces."""
GRACE_S = 5.0
"""Time between the end of a member's pipe and a SIGKILL to its PID."""


class MemberError(RuntimeError):
    """A member raised, died, or did not answer in time. The message names it."""


@dataclass(frozen=True)
class Host:
    """Where members run."""

    name: str
    address: str = "127.0.0.1"
    """Address of the interface that its members listen on."""
    namespace: str | None = None
    """Network namespace, by its name under `NAMESPACES`; None: that of this process."""


class Starter(Protocol):
    """Starts members on other machines (`agents.Agents`)."""

    @property
    def hellos(self) -> Mapping[str, Any]: ...

    def start(self, name: str, host: Host, kind: str, args: tuple, variables: Mapping[str, str]) -> Member:
        """Start a member on the node that `host` is named after."""


class Process(Protocol):
    """A member's process, here or on another machine."""

    @property
    def exitcode(self) -> Any: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...
    def kill(self) -> None: ...


class Member:
    """One process, as seen by the process that started it."""

    def __init__(self, name: str, host: Host, process: Process, pipe: Connection) -> None:
        self.name, self.host = name, host
        self._process, self._pipe = process, pipe
        self._numbers = itertools.count()
        self._alone = asyncio.Lock()

    async def call(self, method: str, *args: Any, timeout_s: float = 120.0) -> Any:
        """Run a method of the member's object and return its answer.

        Raises:
            MemberError: the member raised, died, or did not answer in time.
        """
        async with self._alone:
            number = next(self._numbers)
            try:
                self._pipe.send((number, method, args))
                async with asyncio.timeout(timeout_s):
                    while True:
                        await _readable(self._pipe)
                        answered, failed, answer = self._pipe.recv()
                        if answered == number:      # others are late answers to abandoned calls
                            break
            except TimeoutError:
                raise MemberError(f"{self.name} gave no answer to {method} within {timeout_s:g} s") from None
            except (EOFError, OSError):
                self._process.join(GRACE_S)
                raise MemberError(f"{self.name} died in {method}, exit code {self._process.exitcode}") from None
        if failed:
            raise MemberError(f"{self.name}, {method}:\n{answer}")
        return answer

    def end(self) -> None:
        """Close the pipe, which ends the process. If it does not end, it is killed by its PID."""
        _end([self])


class Members:
    """Starts members and ends all of them. Use it as a context manager.

    Args:
        preload: modules that the server imports before any member forks from it.
        logs: folder for the members' output; None: they use this process's output.
        agents: start the members of hosts that have an agent.
    """

    def __init__(self, preload: Sequence[str], logs: Path | None = None, agents: Starter | None = None) -> None:
        self._logs, self._agents = logs, agents
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._members: list[Member] = []

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *exc: object) -> None:
        _end(self._members)
        self._members = []

    def start(self, name: str, host: Host, kind: str, *args: Any, variables: Mapping[str, str] | None = None) -> Member:
        """Start a process that makes an object of `kind` ("module:Class") from `args` at its first call.

        Args:
            variables: environment of the process, set before anything of `kind` is imported.
        """
        if self._agents is not None and host.name in self._agents.hellos:
            self._members.append(self._agents.start(name, host, kind, args, dict(variables or {})))
            return self._members[-1]
        ours, theirs = self._context.Pipe()
        log = None if self._logs is None else self._logs / f"{name.replace(' ', '-')}.log"
        process = self._context.Process(target=serve, args=(theirs, host, kind, args, dict(variables or {}), log),
                                        name=name, daemon=True)
        process.start()
        theirs.close()
        self._members.append(Member(name, host, process, ours))
        return self._members[-1]


def _end(members: Sequence[Member]) -> None:
    for member in members:
        member._pipe.close()
    await_ends([member._process for member in members])


def await_ends(processes: Sequence[Process]) -> None:
    """Wait for members whose pipes are closed. They share the grace time; the rest are then killed by PID."""
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join(GRACE_S)


async def together(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """The answers in order, once all have arrived. The exception of the first failing call is raised then."""
    answers: list[Result] = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def _readable(pipe: Connection) -> None:
    if pipe.poll():
        return
    loop, descriptor = asyncio.get_running_loop(), pipe.fileno()    # a pipe closed in the meantime has none
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def enter_namespace(name: str) -> None:
    """Move this thread into a network namespace, and with it those that it starts from now on.

    Raises:
        OSError: the namespace does not exist, or this process may not enter it.
    """
    descriptor = os.open(NAMESPACES / name, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def _print_into(log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def serve(pipe: Connection, host: Host, kind: str, args: tuple, variables: dict[str, str], log: Path | None) -> None:
    """Run a member process: answer calls until the pipe is closed."""
    from launch import envvars

    signal.signal(signal.SIGINT, signal.SIG_IGN)        # Ctrl-C reaches all processes of a terminal; the pipe ends this
    envvars.set_for_this_process(variables)
    thing = None
    while True:
        try:
            number, method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if thing is None:
                if log is not None:
                    _print_into(log)
                if host.namespace is not None:
                    enter_namespace(host.namespace)
                module, _, name = kind.partition(":")
                thing = getattr(importlib.import_module(module), name)(*args)
            answer = number, False, getattr(thing, method)(*arguments)
        except Exception:
            answer = number, True, traceback.format_exc()
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
