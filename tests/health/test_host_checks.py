"""NICs, interfaces, limits, space, model files, versions and variables: against real files and this machine."""

from __future__ import annotations

import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from launch.cluster.rdma import Nic
from launch.health.check import worst
from launch.health.checks import environment, interface, limits, model, nics, scratch, versions
from launch.health.checks.interface import nccl_selects
from launch.health.checks.nics import selected
from launch.health.expected import Expected, expected_of
from launch.health.machine import Limit, RealMachine
from launch.slurm.profiles import Profile
from megatron_rl.models.tiny import write_tiny
from tests.health.conftest import bad, named


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    """A tree as the kernel shows it, with eleven devices so that 10 sorts behind 9."""
    for index in range(11):
        port = tmp_path / f"mlx5_{index}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n" if index == 3 else "4: ACTIVE\n")
        (port / "rate").write_text("2.5 Gb/sec (1X SDR)\n" if index == 3 else "400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("Ethernet\n" if index == 10 else "InfiniBand\n")
    return tmp_path


class TestNics:
    def test_sysfs(self, infiniband):
        found = RealMachine(infiniband).nics()
        assert [nic.name for nic in found] == [f"mlx5_{index}" for index in range(11)]
        assert found[3] == Nic("mlx5_3", "DOWN", 2.5) and found[10] == Nic("mlx5_10", "ACTIVE", 400.0, "Ethernet")
        assert RealMachine(infiniband / "absent").nics() == []

    def test_cards_that_the_job_does_not_need_may_be_down(self, infiniband):
        expected = Expected(nics=8, nic_gbit_per_s=400)
        assert bad(nics.check(RealMachine(infiniband), expected, {})) == {"nic.rails": "warning"}, "which eight of ten?"
        found = nics.check(RealMachine(infiniband), Expected(nics=11, nic_gbit_per_s=400), {})
        state = named(found, "nic.state")
        assert state.severity == "critical" and "mlx5_3 is DOWN" in state.evidence

    @pytest.mark.parametrize("value, names", [
        ("mlx5_1", ["mlx5_1", "mlx5_10"]), ("=mlx5_1", ["mlx5_1"]), ("=mlx5_1:1,mlx5_2", ["mlx5_1", "mlx5_2"]),
        ("^mlx5_1", ["mlx5_0", "mlx5_2"]), ("^=mlx5_1", ["mlx5_0", "mlx5_10", "mlx5_2"]), ("ib", [])])
    def test_nccls_way_of_naming(self, value, names):
        """Prefixes unless `=`: `mlx5_1` takes mlx5_10 too (NCCL's documentation of NCCL_IB_HCA)."""
        assert sorted(name for name in ("mlx5_0", "mlx5_1", "mlx5_10", "mlx5_2") if selected(name, value)) == names

    def test_a_name_that_is_not_there(self, infiniband):
        found = named(nics.check(RealMachine(infiniband), Expected(), {"NCCL_IB_HCA": "=mlx5_0,mlx5_77"}),
                      "nic.nccl_ib_hca")
        assert found.severity == "critical" and "names mlx5_77" in found.evidence
        assert nics.check(RealMachine(infiniband), Expected(), {}) == []


class TestInterface:
    machine = RealMachine()

    def test_this_machine(self):
        name = next(name for name, found in psutil.net_if_addrs().items() if any(each.family == 2 for each in found))
        address = next(each.address for each in psutil.net_if_addrs()[name] if each.family == 2)
        found = interface.check(self.machine, {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}, address)
        assert worst(found) == "ok"
        assert named(found, "net.interface").value == {"name": name, "address": address,
                                                       "loopback": address.startswith("127.")}

    def test_names_that_are_not_there(self):
        found = interface.check(self.machine, {"GLOO_SOCKET_IFNAME": "ib", "NCCL_SOCKET_IFNAME": "ib7"}, "192.0.2.1")
        assert {check.name for check in found if check.severity == "critical"} == {"net.gloo", "net.nccl",
                                                                                  "net.interface"}
        assert "one exact name" in named(found, "net.gloo").evidence

    @pytest.mark.parametrize("value, names", [("ib", ["ib0", "ib1"]), ("=ib0", ["ib0"]), ("^ib", ["eth0", "lo"]),
                                              ("^=ib0", ["eth0", "ib1", "lo"]), ("eth,ib1", ["eth0", "ib1"])])
    def test_nccls_way_of_naming(self, value, names):
        assert sorted(name for name in ("lo", "eth0", "ib0", "ib1") if nccl_selects(name, value)) == names


class TestLimits:
    def test_the_soft_limit_is_raised_and_children_inherit_it(self):
        code = ("import resource, subprocess, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
                "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard)); "
                "from launch.health.checks import limits; from launch.health.expected import Expected; "
                "from launch.health.machine import RealMachine; limits.check(RealMachine(), Expected()); "
                "subprocess.run([sys.executable, '-c', 'import resource; "
                "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])'])")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert int(done.stdout) == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)) > 1024

    def test_locked_memory_matters_only_with_rdma(self):
        class Small(RealMachine):
            def limit(self, name):
                return Limit(65536, 65536)

        assert named(limits.check(Small(), Expected(nics=0)), "limit.memlock").severity == "ok"
        assert named(limits.check(Small(), Expected(nics=8)), "limit.memlock").severity == "critical"


class TestScratch:
    def test_space(self, tmp_path):
        assert worst(scratch.check(Expected(scratch=str(tmp_path), scratch_bytes=1, shm_bytes=1), {})) == "ok"
        wanting = scratch.check(Expected(scratch=str(tmp_path), scratch_bytes=2 ** 60, shm_bytes=1), {})
        assert named(wanting, "disk.scratch").severity == "warning" and "GiB free" in wanting[0].evidence
        absent = named(scratch.check(Expected(scratch="/tmp/not/there"), {"TMPDIR": "/tmp"}), "disk.scratch")
        assert absent.severity == "critical" and "/tmp/not/there does not exist" in absent.evidence

    def test_a_tmpdir_that_is_not_there_is_not_replaced_without_a_word(self):
        found = named(scratch.check(Expected(), {"TMPDIR": "/tmp/not/there"}), "disk.scratch")
        assert found.severity == "critical" and "/tmp/not/there does not exist" in found.evidence

    def test_a_path_in_which_no_socket_fits(self, tmp_path):
        folder = tmp_path / ("x" * 60)
        folder.mkdir()
        found = named(scratch.check(Expected(scratch=str(folder)), {}), "disk.scratch")
        assert found.severity == "critical" and "107 bytes" in found.evidence and found.value > 60


class TestModel:
    def test_complete_missing_and_another(self, run_yaml, tmp_path):
        folder = tmp_path / "model"
        (folder / "tokenizer.json").write_text("{}")
        expected = Expected(model=str(folder), model_weights=False)
        before = named(model.check(expected), "model.fingerprint").value
        assert worst(model.check(expected)) == "ok"
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace("1e-05", "1e-06"))
        assert named(model.check(expected), "model.fingerprint").value != before
        weights = model.check(Expected(model=str(folder)))
        assert weights[0].severity == "critical" and "model.safetensors" in weights[0].evidence
        (folder / "config.json").unlink()
        assert "no config.json" in model.check(expected)[0].evidence
        assert model.check(Expected()) == []

    def test_a_teacher_is_checked_and_compared_too(self, run_yaml, tmp_path):
        folder, teacher = tmp_path / "model", write_tiny(tmp_path / "teacher")
        (folder / "tokenizer.json").write_text("{}")
        alone, both = (model.check(Expected(model=str(folder), model_weights=False, teacher=name))
                       for name in (None, str(teacher)))
        assert worst(both) == "ok" and "complete: 1 files" in both[0].evidence
        assert named(both, "model.fingerprint").value != named(alone, "model.fingerprint").value
        (teacher / "model.safetensors").unlink()
        [found] = model.check(Expected(model=str(folder), model_weights=False, teacher=str(teacher)))
        assert found.severity == "critical" and found.value == str(teacher)


class TestVersions:
    def test_what_is_installed(self):
        [found] = versions.check(Expected(libraries=("click",)))
        assert found.severity == "ok" and found.value["python"] == sys.version.split()[0]
        assert versions.version_of("click") == metadata.version("click")

    def test_what_is_missing(self):
        found = named(versions.check(Expected(libraries=("click", "no-such-library"))), "lib.installed")
        assert found.severity == "critical" and found.value == ["no-such-library"]


class TestEnvironment:
    def test_partitions_of_a_real_configuration_agree(self, run_yaml):
        from launch.cluster.file import load_cluster
        from launch.config.load import load_config

        expected = expected_of(load_config(run_yaml).config, load_cluster("configs/clusters/h100x8.yaml"),
                               profile=Profile())
        assert (expected.gpus, expected.nics, expected.nic_gbit_per_s, expected.nvlink) == (8, 8, 400.0, True)
        assert worst(environment.check(expected, {"NCCL_DEBUG": "WARN"})) == "ok"

    def test_a_difference_between_partitions(self):
        expected = Expected(environment={"training": {"NCCL_CUMEM_ENABLE": "0"}, "rollout": {}})
        found = named(environment.check(expected, {}), "env.partitions")
        assert found.severity == "critical" and "NCCL_CUMEM_ENABLE is 0 for training and not set" in found.evidence
        assert named(environment.check(expected, {"NCCL_CUMEM_ENABLE": "0"}), "env.partitions").severity == "ok"

    def test_what_belongs_to_a_node_is_not_compared(self):
        [first, *_] = environment.check(Expected(), {"NCCL_IB_HCA": "mlx5", "NCCL_ALGO": "Ring", "HOME": "/root",
                                                     "GLOO_SOCKET_IFNAME": "ib0"})
        assert first.value == {"NCCL_ALGO": "Ring"}


def test_expected_goes_through_its_file(tmp_path):
    expected = Expected(gpus=4, libraries=("torch",), nic_names=("mlx5_0",),
                        environment={"training": {"NCCL_ALGO": "Ring"}})
    expected.write(tmp_path)
    assert Expected.read(tmp_path) == expected
