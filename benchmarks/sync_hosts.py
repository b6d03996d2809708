"""Simulated hosts for a benchmark: network namespaces with one shaped NIC each, all on one bridge.

No interface is created outside these namespaces, so no traffic leaves them. Names begin with `PREFIX` and the PID of
the process that made them. The next benchmark removes what a killed one left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from launch.errors import UserError
from launch.processes import output_of
from megatron_rl.sync_bench.members import NAMESPACES, Host, enter_namespace

Made = TypeVar("Made")

PREFIX = "mrlsync"
COMMAND_S = 20.0
BURST = "128kb"
"""Burst of the token bucket. It must exceed a segment that the kernel has not split yet, or the segment is dropped."""
LATENCY = "50ms"
"""Longest queue in front of a NIC, like a switch buffer at this rate."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a host's NIC has carried, including headers."""

    out: int
    into: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.out - before.out, self.into - before.into)


class Network:
    """Creates the hosts and removes them. Use it as a context manager.

    Args:
        count: number of hosts.
        rate_bits: rate of each NIC in each direction.
    """

    _numbers = itertools.count()

    def __init__(self, count: int, rate_bits: float) -> None:
        self._count, self._rate = count, rate_bits
        self._base = f"{PREFIX}-{os.getpid()}-{next(self._numbers)}"
        self.hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Network:
        if why := why_not():
            raise UserError(f"hosts cannot be simulated here: {why}",
                            fix="run it as root on Linux, with iproute2 installed")
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._remove()

    def traffic(self) -> tuple[Traffic, ...]:
        """Bytes carried by each host's NIC so far, from its counters."""
        found = []
        for host in self.hosts:
            assert host.namespace is not None, "each host is a namespace"
            link, = json.loads(_run("ip", "-n", host.namespace, "-s", "-j", "link", "show", "eth0"))
            found.append(Traffic(link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]))
        return tuple(found)

    def _make(self) -> None:
        switch = f"{self._base}-switch"
        shape = ("root", "tbf", "rate", f"{self._rate:.0f}bit", "burst", BURST, "latency", LATENCY)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        hosts = []
        for number in range(self._count):
            space, port, address = f"{self._base}-{number}", f"port{number}", f"10.77.0.{number + 1}"
            _run("ip", "netns", "add", space)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", link, "up")
            _run("tc", "-n", space, "qdisc", "add", "dev", "eth0", *shape)      # out of the host
            _run("tc", "-n", switch, "qdisc", "add", "dev", port, *shape)       # into it
            hosts.append(Host(f"host {number}", address, space))
        self.hosts = tuple(hosts)

    def _remove(self) -> None:
        for space in _spaces():
            if space.startswith(f"{self._base}-"):
                _run("ip", "netns", "delete", space)


def inside(host: Host, make: Callable[[], Made]) -> Made:
    """Make something whose sockets and threads are in the network namespace of a host. Runs `make` in a thread of its
    own: a namespace belongs to a thread, and the threads that it starts inherit it."""
    assert host.namespace is not None, "each host is a namespace"
    with ThreadPoolExecutor(1, initializer=enter_namespace, initargs=(host.namespace,)) as thread:
        return thread.submit(make).result()


def why_not() -> str:
    """Why hosts cannot be simulated on this machine; "" if they can."""
    if not Path("/proc/self/ns/net").exists():
        return "no network namespaces"
    if os.geteuid() != 0:
        return "not root"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"{' and '.join(missing)} not found"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
    except UserError as error:
        return error.what
    try:
        _run("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1mbit", "burst", BURST, "latency",
             LATENCY)
    except UserError as error:
        return error.what
    finally:
        _run("ip", "netns", "delete", probe)
    return ""


def remove_leftovers() -> list[str]:
    """Remove the namespaces of benchmarks that ended without doing so. Returns their names."""
    removed = []
    for space in _spaces():
        owner = space.split("-")[1] if space.startswith(f"{PREFIX}-") else ""
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _run("ip", "netns", "delete", space)
            removed.append(space)
    return removed


def wait_for_quiet(network: Network, timeout_s: float = 10.0) -> None:
    """Return when all NICs are idle.

    Raises:
        TimeoutError: some still carry traffic.
    """
    deadline, before = time.monotonic() + timeout_s, network.traffic()
    while time.monotonic() < deadline:
        time.sleep(0.1)         # the counters do not announce when they stop
        now = network.traffic()
        if now == before:
            return
        before = now
    raise TimeoutError(f"the NICs still carried traffic after {timeout_s:g} s")


def _spaces() -> Sequence[str]:
    return sorted(each.name for each in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else ()


def _run(*command: str) -> str:
    done = output_of(command, timeout_s=COMMAND_S, own_session=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)} failed: {done.stderr.strip() or f'exit code {done.returncode}'}",
                        fix="run it by hand as root")
    return done.stdout
