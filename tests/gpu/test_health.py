"""The preflight on a real GPU: what NVML says of it, and the fabric check over NCCL."""

from __future__ import annotations

import pytest
import torch

from launch.cluster import nvml
from launch.health.checks import gpus
from launch.health.expected import Expected
from launch.health.machine import RealMachine
from launch.health.network import Member, Result, Task
from launch.ports import allocate
from tests.health.conftest import named
from tests.health.test_network import run

pytestmark = pytest.mark.gpu


def test_a_real_gpu():
    report = nvml.read_gpus()
    assert report.error is None and report.driver and len(report.gpus) >= torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    gpu = next(gpu for gpu in report.gpus if gpu.uuid == f"GPU-{properties.uuid}")
    assert gpu.name == properties.name and gpu.error is None
    assert abs(gpu.memory_bytes - properties.total_memory) < 0.05 * gpu.memory_bytes
    tensor = torch.ones(2 ** 28, device="cuda")                         # 1 GiB that NVML must see
    used = next(each for each in nvml.read_gpus().gpus if each.uuid == gpu.uuid).used_bytes
    assert used >= tensor.nbytes
    checks = gpus.check(RealMachine(), Expected(gpus=1), {}, None)
    assert named(checks, "gpu.count").severity == "ok" and named(checks, "gpu.driver").value == report.driver


def test_nccl_on_one_gpu(tmp_path):
    """The same program over NCCL. One GPU makes one member: an all-reduce with itself, and no pair."""
    ports = allocate(6, address="127.0.0.1")
    try:
        task = Task((Member("a", 0, "127.0.0.1"),), "nccl", ports.rendezvous, allreduce_bytes=2 ** 24, repeats=2)
        assert run(task, tmp_path, [0]) == [0], (tmp_path / "0.log").read_text()
    finally:
        ports.release()
    assert Result.read(tmp_path).allreduce_s > 0 and not Result.read(tmp_path).wrong
