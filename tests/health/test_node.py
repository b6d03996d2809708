"""Faults of one node, put in at the adapter, and the check that must find each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from launch import envvars
from launch.errors import UserError
from launch.health import node as node_module
from launch.health.check import checks_from_json, checks_to_json
from launch.health.checks import gpus
from launch.health.expected import Expected
from launch.health.machine import RealMachine
from launch.health.node import CheckContext, check_node
from launch.health.simulated import load, machine_of
from tests.health.conftest import ENVIRONMENT, H100X8, bad, named

GIB = 1024 ** 3
FAULTS = [
    ({"missing": [5]}, "gpu.count", "critical", "7 GPUs, but CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 names others"),
    ({"gpus": {2: {"ecc_uncorrected": 4}}}, "gpu.ecc", "critical", "GPU 2 (GPU-n1-2) has had 4 uncorrected"),
    ({"gpus": {0: {"remap_pending": True}}}, "gpu.rows", "critical", "row remapping pending"),
    ({"gpus": {0: {"remap_failed": True}}}, "gpu.rows", "critical", "no spare memory rows"),
    ({"gpus": {3: {"used_bytes": 12 * GIB}}}, "gpu.memory", "critical", "12.0 of 80 GiB in use"),
    ({"gpus": {3: {"processes": [2 ** 22 + 1]}}}, "gpu.processes", "critical", "running on GPU 3"),
    ({"gpus": {1: {"throttle": ["HW thermal slowdown"], "temperature_c": 91}}}, "gpu.throttle", "critical",
     "at 91 C"),
    ({"gpus": {1: {"throttle": ["SW thermal slowdown"]}}}, "gpu.throttle", "warning", "SW thermal"),
    ({"gpus": {6: {"nvlinks_up": 17}}}, "gpu.nvlink", "critical", "17 of 18 NVLinks up"),
    ({"gpu": {"nvlinks": 0, "nvlinks_up": 0}}, "gpu.nvlink", "critical", "no NVLink"),
    ({"gpus": {4: {"pcie_width": 8}}}, "gpu.pcie", "warning", "8 of 16 PCIe lanes"),
    ({"gpus": {7: {"error": "GPU is lost"}}}, "gpu.lost", "critical", "GPU is lost"),
    ({"gpu": {"name": "NVIDIA A100-SXM4-80GB"}}, "gpu.model", "critical", "the plan is for H100-SXM-80GB"),
    ({"gpu": {"name": "NVIDIA H100 PCIe"}}, "gpu.model", "critical", "H100 PCIe"),
    ({"gpus": {5: {"name": "NVIDIA H200"}}}, "gpu.model", "critical", "several kinds"),
    ({"error": "Driver Not Loaded"}, "gpu.driver", "critical", "does not answer: Driver Not Loaded"),
    ({"nics": {"missing": ["mlx5_4"]}}, "nic.count", "critical", "7 RDMA devices"),
    ({"nics": {"down": ["mlx5_3"]}}, "nic.state", "critical", "mlx5_3 is DOWN; 7 of 8"),
    ({"nics": {"slow": {"mlx5_6": 200}}}, "nic.rate", "critical", "mlx5_6 runs at 200"),
    ({"limits": {"memlock": 65536}}, "limit.memlock", "critical", "65,536 bytes"),
    ({"limits": {"nofile": 1024}}, "limit.nofile", "critical", "1,024 open files"),
    ({"limits": {"nofile": 20000}}, "limit.nofile", "warning", "20,000 open files"),
    ({"limits": {"nproc": 1024}}, "limit.nproc", "critical", "1,024 processes"),
    ({"cpus": 1}, "cpu.affinity", "critical", "1 cores for 8 GPUs"),
    ({"cpus": 48}, "cpu.affinity", "warning", "requested 96"),
]


def test_a_healthy_node_has_nothing_against_it(fleet):
    [checks] = fleet(1).values()
    assert bad(checks) == {}
    subjects = {check.subject for check in checks}
    assert {"gpu", "nic", "net", "limit", "cpu", "disk", "lib", "env"} <= subjects


@pytest.mark.parametrize("fault, name, severity, evidence", FAULTS, ids=[f"{row[1]}-{row[2]}-{index}" for index, row
                                                                        in enumerate(FAULTS)])
def test_fault(fleet, fault, name, severity, evidence):
    """Each fault yields its finding, with evidence and a remedy, and no other."""
    [checks] = fleet(1, {"n1": fault}).values()
    found = named(checks, name)
    assert found.severity == severity and evidence in found.evidence and found.remedy
    allowed = {name, "gpu.count"} if name == "gpu.lost" else {name}
    assert set(bad(checks)) <= allowed


def test_memory_tells_cards_of_one_name_apart(fleet):
    a100 = {"gpu": {"name": "NVIDIA A100-SXM4", "memory_bytes": 80 * GIB, "nvlinks": 12}}
    for kind, severity in (("A100-SXM-80GB", "ok"), ("A100-SXM-40GB", "critical")):
        [checks] = fleet(1, {"n1": a100}, expected=replace(H100X8, gpu_kind=kind)).values()
        assert named(checks, "gpu.model").severity == severity


def test_reward_processes_have_cores_besides_those_of_the_ranks(fleet):
    for cores, severity in ((16, "ok"), (15, "warning"), (7, "critical")):
        [checks] = fleet(1, {"n1": {"cpus": cores}}, expected=replace(H100X8, cpus=0, reward_processes=8)).values()
        found = named(checks, "cpu.affinity")
        assert found.severity == severity and (severity != "warning" or "lower reward.workers" in found.remedy)


def test_slurm_gave_fewer_gpus_than_the_node_has(fleet):
    [checks] = fleet(1, environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3"}).values()
    found = named(checks, "gpu.count")
    assert found.severity == "critical" and "8 GPUs, 4 of them in CUDA_VISIBLE_DEVICES" in found.evidence
    assert "--gpus-per-node" in found.remedy


def test_a_cpu_job_has_no_gpu_checks(fleet):
    [checks] = fleet(1, {"n1": {"error": "no driver"}}, expected=Expected(device="cpu")).values()
    assert not [check for check in checks if check.subject in ("gpu", "nic")] and bad(checks) == {}


def test_own_processes_are_not_foreign(tmp_path):
    """A real process with the attempt's mark in its environment is ours; without it, it is a stranger."""
    for mark, severity in (("attempt-1", "ok"), ("attempt-2", "critical")):
        child = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 env={**os.environ, envvars.JOB_MARK: mark})
        try:
            child.stdout.readline()
            file = tmp_path / "hardware.json"
            file.write_text(json.dumps({"nodes": {"n1": {"gpus": {"0": {"processes": [child.pid]}}}}}))
            found = named(gpus.check(load(file, "n1"), H100X8, ENVIRONMENT, "attempt-1"), "gpu.processes")
            assert found.severity == severity
            if severity == "critical":
                assert f"pid {child.pid}" in found.evidence and found.value == [child.pid]
        finally:
            child.communicate(b"")


def test_findings_survive_json(fleet):
    checks = fleet(1, {"n1": {"missing": [1], "nics": {"down": ["mlx5_0"]}}})["n1"]
    assert checks_from_json(json.loads(json.dumps(checks_to_json(checks)))) == checks


def test_a_defective_check_is_a_warning_with_its_error(monkeypatch):
    def broken(context, machine):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(node_module, "SUBJECTS",
                        {"gpu": broken, **{name: node_module.SUBJECTS[name] for name in ("limit", "cpu")}})
    checks = check_node(CheckContext("n1", Expected(device="cpu")))
    assert checks[0].name == "gpu.check_failed" and checks[0].severity == "warning"
    assert "ZeroDivisionError: division by zero (test_node.py:" in checks[0].evidence and len(checks) > 3


def test_the_environment_chooses_the_machine(tmp_path, monkeypatch):
    monkeypatch.delenv(envvars.SIMULATED_GPUS, raising=False)
    assert isinstance(machine_of("n1"), RealMachine)
    file = tmp_path / "hardware.yaml"
    file.write_text("default: {count: 4}\nnodes: {n2: {count: 3}}\n")
    monkeypatch.setenv(envvars.SIMULATED_GPUS, str(file))
    assert len(machine_of("n1").gpus().gpus) == 4 and len(machine_of("n2").gpus().gpus) == 3


@pytest.mark.parametrize("text, fragment", [
    ("default: {cuont: 8}", "unknown key 'cuont'"), ("nodes: {n1: {gpus: {0: {ecc: 1}}}}", "n1.gpus.0"),
    ("nodes: {n1: 8}", "not a mapping"), ("nodes: [", "cannot read"), (None, "cannot read")])
def test_a_misspelt_fault_is_not_health(tmp_path, text, fragment):
    file = tmp_path / "hardware.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=fragment):
        load(file, "n1")

