"""What really travelled between processes: the kernel's own counters of their TCP connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import NamedTuple

_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received` in Linux's `struct tcp_info`."""


class Connection(NamedTuple):
    """One end of an established TCP connection."""

    local: tuple
    remote: tuple
    received: int
    """Bytes since it was made."""


def connections() -> list[Connection]:
    """Of this process."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    found.append(Connection(end.getsockname()[:2], end.getpeername()[:2],
                                            struct.unpack_from("Q", told, _RECEIVED_AT)[0]))
        except OSError:             # not a socket, a listening one, or closed meanwhile
            continue
    return found


def held() -> dict[str, int]:
    """What this process holds: its threads, and its sockets, listening ones too."""
    sockets = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return {"threads": len(os.listdir("/proc/self/task")), "sockets": sockets}


def received(ends: Mapping[Hashable, list[Connection]]) -> Counter:
    """(sender, receiver) -> bytes that the receiver has taken in from the sender, over all their connections.

    Args:
        ends: member -> `connections` of its process.
    """
    owner = {end.local: member for member, found in ends.items() for end in found}
    taken: Counter = Counter()
    for member, found in ends.items():
        for end in found:
            if end.remote in owner:
                taken[owner[end.remote], member] += end.received
    return taken
