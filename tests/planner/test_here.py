"""This machine as a cluster: what a file says of it counts for the kind of GPU that the file describes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.cluster import gpus, inventory, local
from launch.cluster.file import load_cluster
from launch.config.load import load_config
from launch.errors import UserError
from launch.model.builtin import from_builtin
from launch.plan.plan import ForecastPlan
from launch.planner.calibrate.measured import compare
from launch.planner.from_config import plan_of
from launch.planner.here import this_machine
from launch.planner.prepare import prepare
from tests.planner.problems import CONFIGS

TINY = str(CONFIGS / "tiny" / "grpo.yaml")


def test_coefficients_of_a_cpu_are_not_those_of_a_gpu(monkeypatch):
    monkeypatch.setattr(inventory, "read", lambda: None)
    config = load_config(CONFIGS / "tiny" / "grpo.yaml", ["cluster=local"]).config
    made = plan_of(config, from_builtin("qwen2.5-0.5b", "here"), "cpu")
    described = load_cluster(CONFIGS / "clusters" / "local-cpu.yaml")
    assert described.coefficients
    on_cpu, on_gpu = (this_machine(device, made, described=described) for device in ("cpu", "gpu"))
    assert on_cpu.coefficients == described.coefficients and on_cpu.sources == described.sources
    assert on_gpu.coefficients == {} and on_gpu.sources == {} and on_gpu.gpu == gpus.H100


def test_a_cpu_that_no_file_describes_has_the_coefficients_that_are_shipped(monkeypatch):
    """The same as those of the file; a file's own take their place, and its silence means those of H100 clusters."""
    described = load_cluster(CONFIGS / "clusters" / "local-cpu.yaml")
    plain = prepare(TINY, (), "cpu").plan.forecast
    with_file = prepare(TINY, (f"cluster={CONFIGS / 'clusters' / 'local-cpu.yaml'}",), "cpu")
    assert plain.step_s == with_file.plan.forecast.step_s
    config = load_config(TINY, ["cluster=local"]).config
    made = plan_of(config, from_builtin("qwen2.5-0.5b", "here"), "cpu")
    assert this_machine("cpu", made).coefficients == described.coefficients
    bare = replace(described, coefficients={}, sources={})
    assert this_machine("cpu", made, described=bare).coefficients == {}
    assert "another machine" in next(each.message for each in plain.warnings if each.code == "W012")


def test_a_gpu_without_figures_gets_no_forecast_and_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(inventory, "read", lambda: inventory.NodeFacts(("NVIDIA L40S", "NVIDIA L40S"), (48 << 30,) * 2))
    monkeypatch.setattr(local, "gpus", lambda: (0, 1))
    for to_run in (False, True):
        made = prepare(str(CONFIGS / "tiny" / "gpu.yaml"), (), "gpu", to_run=to_run).plan
        assert not isinstance(made, ForecastPlan) and "no figures for a GPU named 'NVIDIA L40S'" in made.no_forecast


def test_the_gpu_is_the_first_that_may_be_used(monkeypatch):
    names, sizes = ("NVIDIA L40S", "NVIDIA H200", "NVIDIA H200"), (48 << 30, 140 << 30, 140 << 30)
    monkeypatch.setattr(inventory, "read", lambda: inventory.NodeFacts(names, sizes))
    monkeypatch.setattr(local, "gpus", lambda: (1, 2))
    assert prepare(str(CONFIGS / "tiny" / "gpu.yaml"), (), "gpu").plan.forecast.cluster.gpu == "H200-SXM-141GB"


def test_a_run_goes_on_without_a_forecast_where_its_workload_does_not_fit():
    words = ["rollout.max_prompt_tokens=3", "workload.prompt_tokens=4"]
    made = prepare(TINY, words, "cpu", to_run=True).plan
    assert not isinstance(made, ForecastPlan) and "workload.prompt_tokens = 4" in made.no_forecast
    assert made.fingerprint() == prepare(TINY, ["rollout.max_prompt_tokens=3", "workload.prompt_tokens=2"],
                                         "cpu").plan \
        .model_copy(update={"config_hash": made.config_hash}).fingerprint()
    nothing = compare(None, [], made.no_forecast)
    assert "workload.prompt_tokens = 4" in nothing.nothing
    with pytest.raises(UserError, match="workload.prompt_tokens = 4"):
        prepare(TINY, words, "cpu")
