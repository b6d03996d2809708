"""The interface to a node's hardware: the real machine, or a simulated one (`launch.health.simulated`)."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.cluster import rdma
from launch.cluster.nvml import GpuReport, read_gpus
from launch.cluster.rdma import Nic, PciPath

PCI = Path("/sys/bus/pci/devices")


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
        """PCI path of a GPU, from its `GpuState.bus_id`; () if unknown."""

    def limit(self, name: str) -> Limit:
        """The limit `nofile`, `memlock` or `nproc` of this process."""

    def cpus(self) -> int:
        """Cores that this process may run on."""


@dataclass(frozen=True)
class RealMachine:
    """This machine."""

    infiniband: Path = rdma.SYSFS
    pci: Path = PCI

    def gpus(self) -> GpuReport:
        return read_gpus()

    def nics(self) -> list[Nic]:
        """RDMA devices, each with its first port."""
        return [nic for nic in rdma.nics(self.infiniband) if nic.port == 1]

    def pci_path(self, bus_id: str | None) -> PciPath:
        if not bus_id:
            return ()
        domain, _, rest = bus_id.lower().partition(":")     # domain: 8 digits in NVML, 4 in the kernel
        return rdma.pci_path(self.pci / f"{int(domain, 16):04x}:{rest}")

    def limit(self, name: str) -> Limit:
        values = resource.getrlimit({"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK,
                                     "nproc": resource.RLIMIT_NPROC}[name])
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in values)
        return Limit(soft, hard)

    def cpus(self) -> int:
        return len(os.sched_getaffinity(0))
