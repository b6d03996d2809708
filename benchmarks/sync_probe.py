"""Rate of a plain transfer on a shaped network, and spare CPU time. Both decide whether a measurement is valid."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from launch.ports import FIRST, Ports
from megatron_rl.sync_bench.lane_probe import LINKS
from megatron_rl.sync_bench.members import Host, Members, together
from megatron_rl.sync_bench.world import LANE
from megatron_rl.weight_sync.protocol import LaneSpec

LEAST_RATE = 0.90
"""Share of the NIC rate that a plain transfer must reach."""
LEAST_SPARE = 0.20
"""Share of the CPU time that must have been idle."""
TIMEOUT_S = 60.0


class PlainTransfer:
    """Runs in a member process: sends to one host and receives from another at the same time."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        self._listener.settimeout(TIMEOUT_S)

    def port(self) -> int:
        return self._listener.getsockname()[1]

    def run(self, address: str, port: int, nbytes: int) -> float:
        """Send `nbytes` to a peer while another peer sends them here. Returns the seconds until all have arrived."""
        failed: list[Exception] = []
        sender = threading.Thread(target=self._send, args=(address, port, nbytes, failed), daemon=True)
        sender.start()
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(TIMEOUT_S)
            buffer, missing, started = memoryview(bytearray(1 << 20)), nbytes, time.perf_counter()
            while missing:
                got = connection.recv_into(buffer)
                if not got:
                    raise ConnectionError(f"the peer closed the connection {missing} bytes early")
                missing -= got
            seconds = time.perf_counter() - started
        sender.join(TIMEOUT_S)
        if failed or sender.is_alive():
            raise ConnectionError(f"sending to {address}:{port} failed: {failed or 'it is still running'}")
        return seconds

    @staticmethod
    def _send(address: str, port: int, nbytes: int, failed: list[Exception]) -> None:
        try:
            with socket.create_connection((address, port), TIMEOUT_S) as connection:
                connection.sendall(bytes(nbytes))
        except OSError as error:
            failed.append(error)


async def plain_rates(members: Members, hosts: Sequence[Host], nbytes: int) -> list[float]:
    """bytes/s into each host while every host sends to the next one, with all NICs busy in both directions."""
    probes = [members.start(f"plain transfer on {host.name}", host, "benchmarks.sync_probe:PlainTransfer", host.address)
              for host in hosts]
    try:
        ports = await together(probe.call("port", timeout_s=TIMEOUT_S) for probe in probes)
        seconds = await together(
            probe.call("run", hosts[(number + 1) % len(hosts)].address, ports[(number + 1) % len(hosts)], nbytes,
                       timeout_s=2 * TIMEOUT_S) for number, probe in enumerate(probes))
    finally:
        for probe in probes:
            probe.end()
    return [nbytes / each for each in seconds]


async def small_bucket(members: Members, sender: Host, receiver: Host) -> float:
    """Seconds for a bucket of a few bytes over a lane between two hosts: the cost of a bucket besides its bytes."""
    ends = [members.start(f"lane on {host.name}", host, LANE, "cpu") for host in (sender, receiver)]
    spec = LaneSpec(0, sender.address, Ports(FIRST).rendezvous, ("receiver",), "gloo", LINKS)
    try:
        await together(end.call("open", spec, number, host.address, TIMEOUT_S)
                       for number, (end, host) in enumerate(zip(ends, (sender, receiver), strict=True)))
        return max(await together(end.call("small", timeout_s=TIMEOUT_S) for end in ends))
    finally:
        for end in ends:
            end.end()


class CpuSpare:
    """Share of all cores' time that was idle while the `with` block ran."""

    def __enter__(self) -> CpuSpare:
        self._before = psutil.cpu_times()
        return self

    def __exit__(self, *exc: object) -> None:
        after = psutil.cpu_times()
        spent = [new - old for new, old in zip(after, self._before, strict=True)]
        idle = (after.idle - self._before.idle) + (getattr(after, "iowait", 0.0) - getattr(self._before, "iowait", 0.0))
        # Linux also counts guest time in `user` and `nice`.
        guests = sum(getattr(after, name, 0.0) - getattr(self._before, name, 0.0) for name in ("guest", "guest_nice"))
        self.share = idle / max(1e-9, sum(spent) - guests)


class Verdict(NamedTuple):
    """Whether a run is valid."""

    rate_share: float
    """Share of the NIC rate in the plain transfer, for the slowest host."""
    spare: float
    """Share of idle CPU time, for the busiest of the measured transfers."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the run is invalid; () if it is valid."""
        found = []
        if self.rate_share < LEAST_RATE:
            found.append(f"a plain transfer reached {self.rate_share:.0%} of the NICs' rate, {LEAST_RATE:.0%} are "
                         "needed")
        if self.spare < LEAST_SPARE:
            found.append(f"the CPU had {self.spare:.1%} to spare, {LEAST_SPARE:.0%} are needed")
        return tuple(found)
