"""Selects the network interface and address of this machine that a job on several nodes uses."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.errors import UserError

LOOPBACK_OF_A_NODE = "127.0.0.2"
"""For a machine without a network. Not 127.0.0.1, because Ray replaces that with the host's address."""


@dataclass(frozen=True)
class JobAddress:
    interface: str
    address: str
    """IPv4."""


def job_address(wanted: str | None = None) -> JobAddress:
    """The interface named `wanted`; else that of the default route; else the first that is up and not loopback; else
    loopback, which works only if all nodes are simulated on this machine.

    Raises:
        UserError: the interface `wanted` does not exist, has no IPv4 address or is down.
    """
    addresses = {name: next((each.address for each in found if each.family == socket.AF_INET), "")
                 for name, found in psutil.net_if_addrs().items()}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return choose(addresses, up, _default_routes(), wanted)


def choose(addresses: Mapping[str, str], up: set[str], routes: Sequence[str], wanted: str | None) -> JobAddress:
    """`job_address` for a described machine: interface -> IPv4 address ("" for none). Pure."""
    usable = {name: address for name, address in addresses.items()
              if address and name in up and not address.startswith("127.")}
    if wanted is not None:
        if wanted not in usable:
            why = "there is no such interface" if wanted not in addresses else "it has no IPv4 address" \
                if not addresses[wanted] else "it is down" if wanted not in up else "it is loopback"
            raise UserError(f"interface {wanted} cannot carry the job: {why}", where="the site profile, interface",
                            fix=f"use one of {', '.join(sorted(usable)) or 'none on this node'}")
        return JobAddress(wanted, usable[wanted])
    for name in (*routes, *sorted(usable)):
        if name in usable:
            return JobAddress(name, usable[name])
    return JobAddress("lo", LOOPBACK_OF_A_NODE)


def _default_routes() -> list[str]:
    """Interfaces of the kernel's default routes, preferred first."""
    table = Path("/proc/net/route")
    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()[1:]] if table.exists() else []
    return [row[0] for row in sorted(rows, key=lambda row: int(row[6])) if row[1] == "00000000"]
