"""`megatron-rl sync bench --on slurm`: a plan's sync over the nodes of an allocation."""

from __future__ import annotations

import json
import sys

import pytest

from tests.slurm.test_real_job import CLUSTER
from tests.slurm_cluster import REPOSITORY, SlurmCluster

SIZES = ("trainer.tp=1", "trainer.pp=1", "trainer.dp=1", "trainer.vpp=1", "trainer.cp=1", "trainer.recompute=none",
         "trainer.sequence_parallel=false", "rollout.tp=2", "rollout.replicas=1", "algorithm.max_staleness=0")


@pytest.mark.slow
def test_a_plan_is_measured_over_the_nodes_of_an_allocation(slurm: SlurmCluster, tmp_path):
    """Every edge goes from node to node, with its bytes and its residual."""
    (tmp_path / "two.yaml").write_text(CLUSTER.replace("count: 3", "count: 2").replace("-003]", "-002]"))
    command = [sys.executable, "-m", "launch", "sync", "bench", "configs/tiny/grpo.yaml", "--on", "slurm", "--device",
               "cpu",
               "--repeats", "1", "--json", f"cluster={tmp_path}/two.yaml", *SIZES]
    job = slurm.submit("--nodes=2", "--ntasks-per-node=1", "--exclusive", f"--output={tmp_path}/out",
                       f"--error={tmp_path}/err", "--wrap", f"exec {' '.join(command)}",
                       variables={"PYTHONPATH": str(REPOSITORY)})
    slurm.wait_for(job, "COMPLETED", timeout_s=150)
    found = json.loads((tmp_path / "out").read_text())
    assert found["on"] == f"2 nodes of job {job}" and found["processes"] == 3
    edges = {edge["name"]: edge for edge in found["edges"]}
    assert sum(edge["bytes"] for edge in edges.values()) == found["bytes"] > 0
    assert {name.partition(" -> ")[2] for name in edges} == {"engine 0 worker 0", "engine 0 worker 1"}
    for edge in edges.values():
        assert edge["measured_s"] > 0
        assert edge["residual_s"] == pytest.approx(edge["measured_s"] - edge["predicted_s"])
    assert found["lane"]["rate"] > 1e6 and found["rates"]["digest"] > 1e6
