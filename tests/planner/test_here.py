"""This machine as a cluster: what a file says of it counts for the kind of GPU that the file describes."""

from __future__ import annotations

from launch.cluster import gpus, inventory
from launch.cluster.file import load_cluster
from launch.config.load import load_config
from launch.planner.architectures import from_builtin
from launch.planner.build import plan
from launch.planner.here import this_machine
from tests.planner.problems import CONFIGS


def test_coefficients_of_a_cpu_are_not_those_of_a_gpu(monkeypatch):
    monkeypatch.setattr(inventory, "read", lambda: None)
    config = load_config(CONFIGS / "tiny" / "grpo.yaml", ["cluster=local"]).config
    made = plan(config, from_builtin("qwen2.5-0.5b", "here"), "cpu")
    described = load_cluster(CONFIGS / "clusters" / "local-cpu.yaml")
    assert described.coefficients
    on_cpu, on_gpu = (this_machine(device, made, config, described) for device in ("cpu", "gpu"))
    assert on_cpu.coefficients == described.coefficients and on_cpu.sources == described.sources
    assert on_gpu.coefficients == {} and on_gpu.sources == {} and on_gpu.gpu == gpus.H100
