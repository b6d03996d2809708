"""Checks that the interface for gloo and NCCL's bootstrap exists, is unambiguous and has an address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from launch.health.check import Check, critical, ok
from launch.health.machine import Machine

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def check(machine: Machine, environment: Mapping[str, str], address: str | None) -> list[Check]:
    """Compares the names with the interfaces of the system. Loopback addresses are judged across nodes
    (`launch.health.compare`), because nodes of one host may use them."""
    addresses = {name: [each.address.partition("%")[0] for each in found
                        if each.family in (socket.AF_INET, socket.AF_INET6)]
                 for name, found in psutil.net_if_addrs().items()}
    checks = [ok("net.host", _host(), f"host {socket.gethostname()}")]
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")
    if gloo is not None:
        checks.append(_named("net.gloo", "GLOO_SOCKET_IFNAME", gloo, [gloo] if gloo in addresses else [], addresses))
    if nccl is not None:
        checks.append(_named("net.nccl", "NCCL_SOCKET_IFNAME", nccl,
                             [name for name in addresses if nccl_selects(name, nccl)], addresses))
    if address is not None or gloo in addresses:
        checks.append(_address(address, gloo, addresses))
    return checks


def nccl_selects(name: str, value: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME selects the interface: prefixes, `=` exact names, `^` all except prefixes."""
    if value.startswith("^="):
        return name not in value[2:].split(",")
    if value.startswith("^"):
        return not any(name.startswith(part) for part in value[1:].split(","))
    if value.startswith("="):
        return name in value[1:].split(",")
    return any(name.startswith(part) for part in value.split(",") if part)


def _named(check: str, variable: str, value: str, matching: list[str], addresses: Mapping[str, list[str]]) -> Check:
    with_address = [name for name in matching if addresses[name]]
    have = ", ".join(name for name in addresses if addresses[name])
    if not with_address:
        what = "has no address" if matching else "is not an interface of this node"
        note = " (gloo takes one exact name, not a prefix)" if check == "net.gloo" and not matching else ""
        return critical(check, value, f"{variable}={value} {what}{note}; interfaces with an address: {have}",
                        "correct it in the site profile, or unset it there so that each node chooses its own")
    return ok(check, value, f"{variable}={value} is {', '.join(with_address)}")


def _address(address: str | None, gloo: str | None, addresses: Mapping[str, list[str]]) -> Check:
    """The address at which other nodes would reach this one."""
    name = next((name for name, found in addresses.items() if address in found), None)
    if address is None and gloo is not None:
        name, address = gloo, addresses[gloo][0] if addresses[gloo] else ""
    loopback = bool(address and ipaddress.ip_address(address).is_loopback)
    value = {"name": name, "address": address, "loopback": loopback}
    if name is None:
        return critical("net.interface", value, f"no interface of this node has the address {address}",
                        "the host name resolves to a stale address: correct DNS or /etc/hosts, or set the interface "
                        "in the site profile")
    return ok("net.interface", value, f"{name}, {address or 'no address'}")


def _host() -> str:
    """Identifies the host: simulated nodes share one."""
    return BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else socket.gethostname()
