"""What is asked about a node's hardware: the machine itself, or a simulated one (`launch.health.simulated`)."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.health.nvml import GpuReport, read_gpus

INFINIBAND, PCI = Path("/sys/class/infiniband"), Path("/sys/bus/pci/devices")
PciPath = tuple[str, ...]
"""What lies above a device, from the root complex down, and the device: `pci0000:15`, `0000:15:01.0`, ..."""


@dataclass(frozen=True)
class Nic:
    """One RDMA device, first port."""

    name: str
    """`mlx5_0`: what NCCL_IB_HCA names."""
    state: str
    """`ACTIVE`, `DOWN`, `INIT`, ..."""
    gbit_per_s: float
    link_layer: str = "InfiniBand"
    pci: PciPath = ()
    """() where the system does not say."""


@dataclass(frozen=True)
class Limit:
    """A resource limit; None is unlimited."""

    soft: int | None
    hard: int | None


class Machine(Protocol):
    """Everything that a simulation replaces."""

    def gpus(self) -> GpuReport: ...

    def nics(self) -> list[Nic]: ...

    def pci_path(self, bus_id: str | None) -> PciPath:
        """Where a GPU hangs, by its `GpuState.bus_id`; () if that is not known."""

    def limit(self, name: str) -> Limit:
        """`nofile`, `memlock` or `nproc` of this process."""

    def cpus(self) -> int:
        """Cores that this process may run on."""


@dataclass(frozen=True)
class RealMachine:
    """This machine."""

    infiniband: Path = INFINIBAND
    pci: Path = PCI

    def gpus(self) -> GpuReport:
        return read_gpus()

    def nics(self) -> list[Nic]:
        """Physical RDMA devices, by name; virtual functions and the like, which hang under no PCI slot, included."""
        if not self.infiniband.is_dir():
            return []
        devices = sorted(self.infiniband.iterdir(), key=lambda path: (len(path.name), path.name))
        return [_nic(device) for device in devices]

    def pci_path(self, bus_id: str | None) -> PciPath:
        if not bus_id:
            return ()
        domain, _, rest = bus_id.lower().partition(":")     # NVML writes eight digits of the domain, the kernel four
        return _path(self.pci / f"{int(domain, 16):04x}:{rest}")

    def limit(self, name: str) -> Limit:
        values = resource.getrlimit({"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK,
                                     "nproc": resource.RLIMIT_NPROC}[name])
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in values)
        return Limit(soft, hard)

    def cpus(self) -> int:
        return len(os.sched_getaffinity(0))


def _nic(device: Path) -> Nic:
    ports = sorted((device / "ports").iterdir(), key=lambda path: path.name)
    state, rate, layer = ((ports[0] / name).read_text(encoding="ascii").strip() for name in
                          ("state", "rate", "link_layer"))
    return Nic(device.name, state.partition(":")[2].strip(), float(rate.split()[0]), layer, _path(device / "device"))


def _path(device: Path) -> PciPath:
    """`/sys/devices/pci0000:15/0000:15:01.0/...` of a link to a device."""
    parts = device.resolve().parts if device.exists() else ()
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[-1]:] if roots else ()
