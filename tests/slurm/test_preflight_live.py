"""`megatron-rl preflight` in an allocation of a real Slurm: one step over its nodes, faults put in at the adapter."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from launch import envvars
from tests.slurm_cluster import REPOSITORY, SlurmCluster, requires_slurm

pytestmark = requires_slurm
FAULTS = {"h100-002": {"gpus": {"2": {"ecc_uncorrected": 4}}}, "h100-003": {"driver": "550.54.15"}}


def preflight(slurm: SlurmCluster, folder: Path, nodes: int, *words: str, faults: dict | None = None,
              timeout_s: float = 120.0) -> tuple[int, dict]:
    """The command in an allocation of so many nodes, `salloc`'s way: exit code and what `--json` prints."""
    (folder / "gpus.json").write_text(json.dumps({"nodes": faults or {}}))
    done = slurm.run("salloc", "--quiet", f"--nodes={nodes}", "--exclusive", "--gpus-per-node=8", sys.executable,
                     "-m", "launch", "preflight", *words, "--json", check=False, timeout_s=timeout_s, cwd=folder,
                     variables={envvars.SIMULATED_GPUS: str(folder / "gpus.json"), "PYTHONPATH": str(REPOSITORY)})
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_all_nodes_by_one_step(slurm, tmp_path):
    code, found = preflight(slurm, tmp_path, 4, faults=FAULTS)
    assert code == 5 and found["exclude"] == "h100-002"
    assert list(found["nodes"]) == ["h100-001", "h100-002", "h100-003", "h100-004"]
    names = {node: {check["check"]: check["severity"] for check in checks} for node, checks in found["nodes"].items()}
    assert names["h100-002"]["gpu.ecc"] == "critical" and names["h100-003"]["gpu.driver.differs"] == "warning"
    for node in names:                                  # each node asked the leader over the shared file system
        assert names[node]["fs.canary"] == "ok" and names[node]["clock.skew"] == "ok"
    assert found["verdict"]["avoid"] == ["h100-003"]
    assert found["verdict"]["critical"] == ["4 nodes are needed, but only 3 of 4 are fit"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_fabric_between_the_nodes(slurm, tmp_path):
    """Simulated nodes have no GPU, so a job on CPUs: one process a node, by gloo."""
    code, found = preflight(slurm, tmp_path, 3, "--tier", "fabric", "--device", "cpu")
    assert code == 0, found["verdict"]
    for checks in found["nodes"].values():
        named = {check["check"]: check for check in checks}
        assert named["fabric.allreduce"]["value"] > 1e6 and named["fabric.bandwidth"]["value"] > 1e6
