"""NICs and rails, on PCI trees as the kernel shows them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from launch.cluster.nvml import GpuReport, GpuState
from launch.cluster.rdma import Nic
from launch.health.checks import nics
from launch.health.expected import Expected
from launch.health.machine import RealMachine
from launch.health.rails import candidates, rails_of
from tests.health.conftest import named

H100 = Expected(gpus=8, nics=8, nic_gbit_per_s=400)
DGX_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
DGX_NICS = {"18": 0, "40": 3, "4f": 4, "5e": 5, "9a": 6, "c0": 9, "ce": 10, "dc": 11}
"""Bus of each GPU's ConnectX-7 -> its number (DGX H100 User Guide, table "Network Modules")."""
DGX_RAILS = [f"mlx5_{number}" for number in DGX_NICS.values()]
STORAGE = (1, 2, 7, 8)


@dataclass(frozen=True)
class Tree(RealMachine):
    """A PCI tree in a folder; NVML's answer is given."""

    buses: tuple[str, ...] = ()

    def gpus(self) -> GpuReport:
        return GpuReport("570", gpus=tuple(
            GpuState(index, f"g{index}", "H100", 1, bus_id=f"00000000:{bus.upper()}:00.0")
            for index, bus in enumerate(self.buses)))


def link(at: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(to)


def nic(folder: Path, number: int, device: Path, rate: int = 400, layer: str = "InfiniBand") -> None:
    """/sys/class/infiniband/mlx5_N, a link to a folder below its PCI device, as the kernel has it."""
    port = device / f"infiniband/mlx5_{number}/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text(f"{layer}\n")
    link(device / f"infiniband/mlx5_{number}/device", device)
    link(folder / f"class/mlx5_{number}", device / f"infiniband/mlx5_{number}")


def dgx(folder: Path, storage_rate: int = 400, storage_layer: str = "InfiniBand", numbers=None) -> Tree:
    """Each GPU and its NIC under one switch below a root port of their own, storage cards elsewhere."""
    numbers = numbers or list(DGX_NICS.values())
    for gpu, bus, number in zip(DGX_GPUS, DGX_NICS, numbers, strict=True):
        switch = folder / f"devices/pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:02.0"
        link(folder / f"pci/0000:{gpu}:00.0", switch / f"0000:{bus}:03.0/0000:{gpu}:00.0")
        nic(folder, number, switch / f"0000:{bus}:04.0/0000:{bus}:00.0")
    for number in STORAGE:
        bus = "29" if number < 5 else "aa"
        nic(folder, number, folder / f"devices/pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:00.{number % 2}", storage_rate,
            storage_layer)
    return Tree(folder / "class", folder / "pci", DGX_GPUS)


@pytest.mark.parametrize("rate, layer", [(400, "InfiniBand"), (200, "InfiniBand"), (400, "Ethernet")])
def test_a_dgx_h100_has_twelve_devices_and_eight_rails(tmp_path, rate, layer):
    found = named(nics.check(dgx(tmp_path, rate, layer), H100, {}), "nic.rails")
    assert found.severity == "ok" and found.value == DGX_RAILS, found.evidence


def test_numbers_say_nothing_of_the_gpu(tmp_path):
    numbers = list(DGX_NICS.values())
    random.Random(0).shuffle(numbers)
    found = named(nics.check(dgx(tmp_path, numbers=numbers), H100, {}), "nic.rails")
    assert found.value == [f"mlx5_{number}" for number in numbers] and "next to the GPUs" in found.evidence


def test_two_gpus_of_one_switch_share_a_rail(tmp_path):
    """An HGX with four NICs: GPU g uses rail g * 4 // 8."""
    for pair in range(4):
        switch = tmp_path / f"devices/pci0000:{pair}0/0000:{pair}0:01.0"
        nic(tmp_path, 9 - pair, switch / f"0000:{pair}1:00.0")
        for gpu in range(2):
            link(tmp_path / f"pci/0000:{pair}{gpu + 2}:00.0", switch / f"0000:{pair}{gpu + 2}:00.0")
    machine = Tree(tmp_path / "class", tmp_path / "pci", tuple(f"{pair}{gpu}" for pair in range(4) for gpu in (2, 3)))
    found = named(nics.check(machine, replace(H100, nics=4), {}), "nic.rails")
    assert found.value == ["mlx5_9", "mlx5_8", "mlx5_7", "mlx5_6"]


def test_two_equally_near_are_not_guessed_at(tmp_path):
    machine = dgx(tmp_path)
    nic(tmp_path, 20, tmp_path / "devices/pci0000:18/0000:18:01.0/0000:18:02.0/0000:18:05.0/0000:19:00.0")
    found = named(nics.check(machine, H100, {}), "nic.rails")
    assert (found.severity, found.value) == ("warning", []) and "mlx5_0, mlx5_20 are equally near" in found.evidence
    assert "interfaces.nccl" in found.remedy


def test_without_a_pci_tree_as_many_as_planned_are_taken_by_number():
    ten = [Nic(f"mlx5_{number}", "ACTIVE", 400) for number in range(10)]
    assert rails_of(ten[:8], 8, ()) == (tuple(f"mlx5_{number}" for number in range(8)), "")
    names, why = rails_of(ten, 8, ())
    assert names == () and "10 candidates" in why
    assert len(candidates([*ten[:8], replace(ten[8], gbit_per_s=100)], 8, 400)) == 8


def test_the_names_of_the_site_profile_are_taken_and_must_be_there(tmp_path):
    machine = dgx(tmp_path)
    site = replace(H100, nic_names=tuple(reversed(DGX_RAILS)))
    assert named(nics.check(machine, site, {}), "nic.rails").value == list(reversed(DGX_RAILS))
    wrong = nics.check(machine, replace(H100, nic_names=("mlx5_0", "mlx5_77")), {})
    found = named(wrong, "nic.nccl_ib_hca")
    assert found.severity == "critical" and "names mlx5_77, which does not exist" in found.evidence


def test_who_names_nics_to_nccl_himself_is_left_alone(tmp_path):
    machine = dgx(tmp_path)
    assert not [each for each in nics.check(machine, H100, {"NCCL_IB_HCA": "mlx5"}) if each.name == "nic.rails"]
