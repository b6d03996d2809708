"""The simulated cluster itself: what the other tests rely on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from launch import processes
from tests import conftest, slurm_cluster
from tests.slurm_cluster import Group, SlurmCluster, running

SLEEPER = """\
#!/bin/bash
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
srun --export=ALL bash -c 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_TOPOLOGY_ADDR"; exec sleep 600'
"""


def sleeper(slurm: SlurmCluster, folder: Path, nodes: int) -> int:
    """A job with a task on each node that says where it is and sleeps; returns when the job's output holds the line of
    every task: srun carries it there, some time after the task wrote it."""
    script = folder / "sleeper.sh"
    script.write_text(SLEEPER)
    job = slurm.submit(f"--nodes={nodes}", f"--output={folder}/out", str(script))
    slurm.wait_for(job, "RUNNING")
    slurm.wait_until(lambda: slurm.output(job).count("\n") == nodes, f"the lines of {nodes} tasks")
    return job


def test_a_task_a_node_with_its_gpus_and_its_place_in_the_tree(slurm, tmp_path):
    job = sleeper(slurm, tmp_path, nodes=9)
    lines = sorted(slurm.output(job).splitlines())
    assert lines[0] == "h100-001 0,1,2,3,4,5,6,7 core.spine1.leaf1.h100-001"
    assert lines[8].endswith("core.spine1.leaf2.h100-009")
    assert [task.name() for task in slurm.tasks("h100-005")] == ["sleep"]


def test_a_node_without_power(slurm, tmp_path):
    sleeper(slurm, tmp_path, nodes=3)
    slurm.kill_node("h100-002")
    assert slurm.tasks("h100-002") == [] and slurm.tasks("h100-003") != []
    slurm.revive_node("h100-002")


@pytest.mark.slurm
def test_nothing_is_left_of_a_cluster_with_a_running_job(tmp_path):
    with running([Group("n", 2)]) as slurm:
        sleeper(slurm, tmp_path, nodes=2)
        tasks = [*slurm.tasks("n-001"), *slurm.tasks("n-002")]
        assert len(tasks) >= 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tasks)
    assert processes.still_running(tasks, timeout_s=0.1) == []


def test_variables_of_another_slurm_do_not_reach_the_commands(monkeypatch):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "33")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    environment = SlurmCluster(Path("/nowhere"), [Group("n", 1)]).environment
    assert "SBATCH_TIMELIMIT" not in environment and "SLURM_JOB_ID" not in environment


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_without_slurm_its_tests_are_skipped_but_fail_in_ci(monkeypatch, request, ci, outcome):
    monkeypatch.setattr(slurm_cluster, "missing_programs", lambda: ["slurmd"])
    monkeypatch.setenv("CI", ci)
    request.node.add_marker("slurm")
    with pytest.raises(outcome, match="slurmd"):
        conftest.pytest_runtest_setup(request.node)
