"""The fabric tier inside a job: supervisors measure before the placement, and the leader judges."""

from __future__ import annotations

import importlib.util
import json

import pytest

from launch.health import network
from tests.slurm.stub_run import StubRun


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_nodes_that_are_fit_measure_before_the_job_starts(slurm, tmp_path):
    """Simulated GPUs have no NCCL: one process a node, by gloo. The bad node takes no part."""
    run = StubRun(slurm, tmp_path, "fabric", 4, "run.preflight=fabric", "placement.spare_nodes=1", steps=3,
                  gpus={"nodes": {"h100-002": {"gpus": {2: {"ecc_uncorrected": 4}}}}})
    run.submit("--nodelist=h100-[001-004]")
    past, = run.ended(1, timeout_s=150)
    assert past.status == "finished", run.text()
    folder = run.attempt(1).folder
    task = network.Task.read(folder)
    members = task.members
    assert task.nics == dict.fromkeys(("h100-001", "h100-003", "h100-004"), tuple(f"mlx5_{rail}" for rail in range(8)))
    assert [member.node for member in members] == ["h100-001", "h100-003", "h100-004"]
    result = network.Result.read(folder)
    assert len(result.pairs) == 3 and not result.errors and not result.wrong
    assert "measuring the network: run.preflight = fabric" in run.text()
    assert json.loads((folder / "verdict.json").read_text())["accepted"] == ["h100-001", "h100-003", "h100-004"]
