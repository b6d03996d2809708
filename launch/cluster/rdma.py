"""Reads the RDMA devices of this machine, InfiniBand and RoCE, from sysfs. The only module that does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
PciPath = tuple[str, ...]
"""The PCI devices from the root complex down to a device, which is last: `pci0000:15`, `0000:15:01.0`, ..."""


@dataclass(frozen=True)
class Nic:
    """One port of an RDMA device."""

    name: str
    """Name of the device, such as `mlx5_0`, as used in NCCL_IB_HCA."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, ..."""
    gbit_per_s: float
    link_layer: str = "InfiniBand"
    pci: PciPath = ()
    """() if sysfs does not provide it."""
    port: int = 1


def nics(sysfs: Path = SYSFS) -> list[Nic]:
    """Every port, ordered by the number of its device. Includes virtual functions and other devices without a PCI slot.
    Omits a port that disappears while it is read or whose rate is not a number."""
    devices = sorted(sysfs.glob("*"), key=lambda path: (len(path.name), path.name))
    found = []
    for port in (port for device in devices for port in sorted(device.glob("ports/*"), key=lambda path: path.name)):
        try:
            state, rate, layer = ((port / name).read_text(encoding="ascii", errors="replace").strip()
                                  for name in ("state", "rate", "link_layer"))
            speed = float(rate.split()[0])          # `400 Gb/sec (4X NDR)`
        except (OSError, ValueError, IndexError):
            continue
        device = port.parents[1]
        found.append(Nic(device.name, state.partition(":")[2].strip(), speed, layer, pci_path(device / "device"),
                         int(port.name)))
    return found


def pci_path(device: Path) -> PciPath:
    """The PCI path of a sysfs link to a device: `/sys/devices/pci0000:15/0000:15:01.0/...`."""
    parts = device.resolve().parts if device.exists() else ()
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[-1]:] if roots else ()
