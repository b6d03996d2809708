"""RDMA devices of this machine, InfiniBand and RoCE, as Linux lists them in sysfs: the one reader of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
PciPath = tuple[str, ...]
"""What lies above a device, from the root complex down, and the device: `pci0000:15`, `0000:15:01.0`, ..."""


@dataclass(frozen=True)
class Nic:
    """One port of an RDMA device."""

    name: str
    """Of the device, `mlx5_0`: what NCCL_IB_HCA names."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, ..."""
    gbit_per_s: float
    link_layer: str = "InfiniBand"
    pci: PciPath = ()
    """() where the system does not say."""
    port: int = 1


def nics(sysfs: Path = SYSFS) -> list[Nic]:
    """Every port, by the number of its device. Virtual functions and the like, which hang under no PCI slot, are
    among them. A port that goes away while it is read, or whose rate is no number, is left out."""
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
    """`/sys/devices/pci0000:15/0000:15:01.0/...` of a link to a device."""
    parts = device.resolve().parts if device.exists() else ()
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[-1]:] if roots else ()
