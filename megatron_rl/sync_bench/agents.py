"""The agents on the nodes of an allocation, as the bench sees them."""

from __future__ import annotations

import itertools
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from launch import processes
from launch.cluster.interfaces import job_address
from launch.files.waiting import listed, wait_for
from launch.run.node_files import Hello
from megatron_rl.sync_bench.agent import KEY
from megatron_rl.sync_bench.members import GRACE_S, Host, Member, MemberError

PROVING_S = 10
"""How long a connecting peer has to prove that it knows the key."""
START_S = 300.0
"""Time limit for a process to fork and connect. The first one on a node imports what all of them need."""
Step = Callable[[Sequence[str]], tuple[list[str], dict[str, str]]]
"""A command -> (a command that runs it once on every node, its environment)."""


class Agents:
    """Agents that are started on entry and ended on exit. `hellos` has a greeting of every node.

    Args:
        nodes: the names that agents must greet with.
        step: how to run a command on all nodes.
        preload: modules that the agents' members have imported when they fork.
        logs: folder of the step's log.
        deadline_s: time limit for all agents to greet.

    Raises:
        MemberError: an agent did not arrive; the message names its node.
    """

    def __init__(self, nodes: Sequence[str], step: Step, preload: Sequence[str], logs: Path, deadline_s: float,
                 interface: str | None = None) -> None:
        self._nodes, self._step, self._preload = nodes, step, preload
        self._log, self._deadline_s = logs / "agents.log", deadline_s
        self._key = secrets.token_bytes(32)
        self._listener = socket.create_server((job_address(interface).address, 0), backlog=4096)
        self._agents: dict[str, Connection] = {}
        self._members: dict[int, Connection] = {}
        self._numbers = itertools.count()
        self._came = threading.Condition()
        self.hellos: dict[str, Hello] = {}

    def __enter__(self) -> Agents:
        threading.Thread(target=self._accept, name="agents", daemon=True).start()
        address, port = self._listener.getsockname()
        command, environment = self._step([sys.executable, "-m", "megatron_rl.sync_bench.agent", address, str(port)])
        self._child = processes.start("agents", command, log=self._log, environment={**environment,
                                                                                      KEY: self._key.hex()})
        try:
            missing = wait_for(self._missing, "to greet", self._deadline_s, say=_say, check=self._check)
            if missing:
                raise MemberError(f"no agent within {self._deadline_s:.0f} s on {listed(missing)}: see {self._log}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        for agent in self._agents.values():
            agent.close()
        if self._child.wait(3 * GRACE_S) is None:       # the agents first end their members
            self._child.end(grace_s=GRACE_S)

    def start(self, name: str, host: Host, kind: str, args: tuple, variables: Mapping[str, str]) -> Member:
        """Start a member on the node that `host` is named after."""
        number = next(self._numbers)
        self._agents[host.name].send((number, name, host, kind, args, dict(variables)))
        with self._came:
            if not self._came.wait_for(lambda: number in self._members, START_S):
                raise MemberError(f"{name} did not start on {host.name} within {START_S:.0f} s: see {self._log}")
        return Member(name, host, _Elsewhere(), self._members[number])

    def _missing(self) -> list[str]:
        with self._came:
            return [node for node in self._nodes if node not in self.hellos]

    def _check(self) -> None:
        if self._child.returncode is not None:
            raise MemberError(f"the agents ended with status {self._child.returncode} before all had greeted: see "
                              f"{self._log}\n{self._log.read_text(encoding='utf-8', errors='replace')[-2000:]}")

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:         # closed, because the bench is over
                return
            threading.Thread(target=self._admit, args=(peer,), daemon=True).start()

    def _admit(self, peer: socket.socket) -> None:
        """Admit a peer. Nothing is unpickled before it has proved that it knows the key."""
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        same, connection = peer.dup(), Connection(peer.detach())
        try:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", PROVING_S, 0))
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            kind, what = connection.recv()
        except (AuthenticationError, EOFError, OSError):
            return connection.close()
        finally:
            same.close()
        with self._came:
            if kind == "agent":
                hello = Hello(**what)
                connection.send(tuple(self._preload))
                self._agents[hello.node], self.hellos[hello.node] = connection, hello
            else:
                self._members[what] = connection
            self._came.notify_all()


class _Elsewhere:
    """A process on another machine. Its agent ends it."""

    exitcode: Any = "in the log of the agents"

    def join(self, timeout: float | None = None) -> None:
        """Do nothing: the process ends when its pipe is closed."""

    def is_alive(self) -> bool:
        return False

    def kill(self) -> None:
        """Nothing to do here."""


def _say(line: str) -> None:
    print(line, file=sys.stderr)        # standard output is for the figures
