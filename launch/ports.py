"""One table of all ports of a job that must be known in advance.

On each node, a job owns one block below the kernel's ephemeral range (a port inside that range is sooner or later taken
by an outgoing connection). The block holds all ports of Ray, and of the torch.distributed stores at which ranks meet.
The supervisor of a node probes the block and holds it; `placement.json` tells the other processes its first port. Two
jobs on one machine get different blocks, and so do two simulated nodes.

Not in the table: the sockets that gloo and NCCL open between ranks that have met, those at which the processes of one
vLLM engine meet, and the one at which the driver announces an abort to the members of a weight sync. Their owners bind
a free ephemeral port on the job's interface and pass the number on.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.errors import UserError

BLOCK = 320
"""Small enough for 32 simulated nodes on one host next to other jobs."""
FIRST, LAST = 12288, 32767
HOLDERS_SHOWN = 4
WELL_KNOWN = frozenset({6379, 8000, 8265, 10001, 29500})
"""Defaults of Ray, vLLM and torchrun. A block that holds one is skipped, because another job will want it."""

TABLE: dict[str, tuple[int, int, str]] = {
    "claim": (0, 1, "held by the launcher to mark the block as taken"),
    "ray_gcs": (1, 1, "Ray control store"),
    "ray_client": (2, 1, "Ray client server"),
    "ray_dashboard": (3, 1, "Ray dashboard, on loopback"),
    "ray_dashboard_agent": (4, 1, "Ray dashboard agent, HTTP"),
    "ray_dashboard_agent_grpc": (5, 1, "Ray dashboard agent, gRPC"),
    "ray_metrics": (6, 1, "Ray metrics export"),
    "ray_runtime_env": (7, 1, "Ray runtime environment agent"),
    "ray_node_manager": (8, 1, "Ray node manager (raylet)"),
    "ray_object_manager": (9, 1, "Ray object manager"),
    "rendezvous": (10, 1, "torch.distributed store of the training ranks"),
    "lanes": (32, 128, "weight-sync store of each training rank"),
    "ray_workers": (160, 160, "Ray worker processes"),
}
"""Name -> (offset in the block, number of ports, purpose). docs/config.md shows this table."""


@dataclass(frozen=True)
class Ports:
    """A job's block on one node. The process that allocated it also holds the claim; a pickled copy does not."""

    base: int
    hold: socket.socket | None = field(default=None, compare=False, repr=False)

    def __getattr__(self, name: str) -> int:
        if name.startswith("_") or name not in TABLE or TABLE[name][1] != 1:
            raise AttributeError(f"{name!r} is not a single port of launch.ports.TABLE")
        return self.base + TABLE[name][0]

    def lane(self, rank: int) -> int:
        """Weight-sync port of a training rank on this node. Raises UserError past the end of the table."""
        offset, count, _ = TABLE["lanes"]
        if not 0 <= rank < count:
            raise UserError(f"rank {rank} exceeds the {count} training ranks per machine that the port table has room "
                            f"for", where="launch/ports.py", fix=f"use at most {count}")
        return self.base + offset + rank

    @property
    def ray_worker_range(self) -> tuple[int, int]:
        """(lowest, highest) port of Ray's workers, inclusive."""
        offset, count, _ = TABLE["ray_workers"]
        return self.base + offset, self.base + offset + count - 1

    def release(self) -> None:
        """Give the block back."""
        if self.hold is not None:
            self.hold.close()

    def __reduce__(self):
        return Ports, (self.base,)


def blocks(ephemeral_floor: int = LAST + 1) -> list[int]:
    """First ports of all usable blocks: those below the ephemeral range, or all blocks if there are none."""
    bases = [base for base in range(FIRST, LAST + 2 - BLOCK, BLOCK)
             if not any(base <= port < base + BLOCK for port in WELL_KNOWN)]
    return [base for base in bases if base + BLOCK <= ephemeral_floor] or bases


def allocate(block_seed: int = 0, *, address: str = "0.0.0.0", pinned: int | None = None) -> Ports:
    """Find a block whose ports can all be bound, and hold it until `Ports.release()` or the end of this process.

    Args:
        block_seed: where the search starts. Jobs with different seeds rarely collide, and a job that does moves on.
        address: the interface to probe; all interfaces by default.
        pinned: the user's `run.port_base`: only this block is tried.

    Raises:
        UserError: the pinned block does not fit below 65536 or has a port in use (the message names the port and its
            process), or no block is free.
    """
    if pinned is not None:
        if pinned + BLOCK > 65536:
            raise UserError(f"run.port_base = {pinned}: the block of {BLOCK} ports ends past 65535",
                            where="run.port_base", fix=f"use at most {65536 - BLOCK}, or null for a free block")
        ports, taken = _claim(pinned, address)
        if ports is None:
            raise UserError(f"port {taken} ({_purpose(pinned, taken)}) is already taken{_holder(taken)}",
                            where=f"run.port_base = {pinned} pins ports {pinned} to {pinned + BLOCK - 1}",
                            fix="end that process, choose another block, or set run.port_base=null")
        return ports
    candidates = blocks(_ephemeral_floor())
    in_use: list[int] = []
    for step in range(len(candidates)):
        ports, taken = _claim(candidates[(block_seed + step) % len(candidates)], address)
        if ports is not None:
            return ports
        in_use.append(taken)
    shown = "; ".join(f"port {port} is taken{_holder(port)}" for port in in_use[:HOLDERS_SHOWN])
    raise UserError(f"none of the {len(candidates)} blocks of {BLOCK} ports from {candidates[0]} on is free: {shown}"
                    + ("; ..." if len(in_use) > HOLDERS_SHOWN else ""),
                    where=f"{socket.gethostname()}, address {address}",
                    fix="end these processes or other jobs, or pin a free block: run.port_base=...")


def _claim(base: int, address: str) -> tuple[Ports | None, int]:
    """(ports, 0), or (None, the first port that is taken)."""
    hold = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        hold.bind((address, base))
    except OSError as error:
        hold.close()
        return None, _taken(error, base)
    for offset, count, _ in TABLE.values():
        for port in range(base + max(offset, 1), base + offset + count):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                # Bind as servers do: connections of an earlier job in TIME_WAIT do not count, listeners do.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, port))
                except OSError as error:
                    hold.close()
                    return None, _taken(error, port)
    return Ports(base, hold), 0


def _taken(error: OSError, port: int) -> int:
    if error.errno not in (errno.EADDRINUSE, errno.EACCES):
        raise error
    return port


def _purpose(base: int, port: int) -> str:
    for name, (offset, count, _) in TABLE.items():
        if offset <= port - base < offset + count:
            return name
    return "unused"


def _holder(port: int) -> str:
    """` by python (pid 123)`, if this user may see the process."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""


def _ephemeral_floor() -> int:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(file.read_text().split()[0]) if file.exists() else LAST + 1
