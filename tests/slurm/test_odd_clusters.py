"""Clusters that are not as one would like: no topology, no accounting, accounts that are refused, names of every form,
nodes of several kinds. Real Slurms, small ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.slurm.client import Slurm
from launch.slurm.refusals import SlurmError, names
from tests.slurm.rehearsing import SCRIPT_7B, rehearse
from tests.slurm_cluster import REPOSITORY, Group, SlurmCluster, running

pytestmark = pytest.mark.slurm
ODD = (Group("gpu", 2, listed=("gpu-001-ib0", "gpu-002-ib0")),
       Group("rack", 4, listed=("r1n08", "r1n09", "r2n08", "r2n10"), partition="racks"),
       Group("small", 2, "a100", 4, partition="small"), Group("cpu", 1, None, partition="cpu"))
CLOSED = "PartitionName=closed Nodes=gpu-001-ib0,gpu-002-ib0 AllowAccounts=others MaxTime=INFINITE State=UP"


@pytest.fixture(scope="module")
def odd() -> Iterator[SlurmCluster]:
    """No topology plug-in, no accounting, a partition that takes other people's accounts only."""
    with running(ODD, settings=CLOSED) as cluster:
        yield cluster


@pytest.fixture
def client(odd) -> Slurm:
    return Slurm(odd.environment)


def launch(slurm: SlurmCluster, folder: Path, *words: str):
    return slurm.run("python3", "-m", "launch", "launch", "configs/7b/grpo.yaml", "--on", "slurm", "--quiet",
                     "run.rehearse=true", f"run.dir={folder}/runs", *words, check=False, timeout_s=60)


def refused(answer, *words: str) -> None:
    """Exit code 6, nothing on stdout, a message with its remedy and no traceback."""
    assert answer.returncode == 6 and answer.stdout == "" and "Traceback" not in answer.stderr, answer.stderr
    assert all(word in answer.stderr for word in (*words, "fix:")), answer.stderr


def test_a_partition_that_does_not_exist(odd, tmp_path):
    refused(launch(odd, tmp_path, "--partition", "nope"), "--partition", "sinfo -s")


def test_an_account_that_is_refused(odd, tmp_path):
    refused(launch(odd, tmp_path, "--partition", "closed", "--account", "wrong"), "--account", "sacctmgr")


def test_nodes_with_fewer_gpus_than_the_plan_wants(odd, tmp_path):
    refused(launch(odd, tmp_path, "--partition", "small"), "sinfo -N")


def test_more_nodes_than_there_are(odd, tmp_path):
    cluster = tmp_path / "cluster.yaml"
    text = (REPOSITORY / "configs/clusters/h100x2.yaml").read_text()
    cluster.write_text(text.replace("count: 2", "count: 9").replace("[001-002]", "[001-009]"))
    refused(launch(odd, tmp_path, f"cluster={cluster}", "--spares", "7"), "sinfo -N")


def test_no_topology_and_names_with_a_suffix(odd, client, tmp_path):
    """`scontrol show hostnames` says nothing at all for such names in brackets; the rehearsal places on them."""
    assert client.topology() == ()
    found = rehearse(odd, tmp_path, SCRIPT_7B)
    assert found.report["ok"] and set(found.report["nodes"]) == {"gpu-001-ib0", "gpu-002-ib0"}
    assert "no topology" in found.output and "topology.unknown" not in found.output


def test_nodes_that_do_not_know_their_switches(tmp_path):
    """Slurm has a tree, and a prolog of the site takes the variable away: the leader asks once."""
    prolog = tmp_path / "prolog"
    prolog.write_text("#!/bin/sh\necho unset SLURM_TOPOLOGY_ADDR\necho unset SLURM_TOPOLOGY_ADDR_PATTERN\n")
    prolog.chmod(0o755)
    tree = ("SwitchName=leaf1 Nodes=h100-001,h100-003\nSwitchName=leaf2 Nodes=h100-002,h100-004\n"
            "SwitchName=core Switches=leaf[1-2]\n")
    text = (REPOSITORY / "configs/clusters/h100x2.yaml").read_text()
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(text.replace("count: 2", "count: 4").replace("[001-002]", "[001-004]"))
    with running([Group("h100", 4)], tree, settings=f"TaskProlog={prolog}") as slurm:
        found = rehearse(slurm, tmp_path, SCRIPT_7B, f"cluster={cluster}", "trainer.tp=4", "trainer.pp=1",
                         "trainer.cp=1",
                         "trainer.dp=4", "rollout.tp=4", "rollout.replicas=4", options=("--nodes=4",))
    assert not any(said["switches"] for said in found.said), "no process knows"
    assert json.loads((found.attempt.folder / "slurm-calls.json").read_text()).count("scontrol show topology") == 1
    assert found.report["ok"] and "topology.unknown" not in found.output
    trainers = {rank.node for rank in found.attempt.placement().training}
    assert trainers in ({"h100-001", "h100-003"}, {"h100-002", "h100-004"}), "on one leaf"


def test_names_of_racks(odd, client, tmp_path):
    job = odd.submit("--partition=racks", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap",
                     "true")
    odd.wait_for(job, "COMPLETED")
    assert client.show_job(str(job)).nodes == ("r1n08", "r1n09", "r2n08", "r2n10")


def test_no_accounting(odd, client):
    with pytest.raises(SlurmError) as error:
        client.account("1")
    assert "accounting off" in names(error.value) and "outcome.json" in error.value.fix


def test_a_log_directory_that_does_not_exist(odd, tmp_path):
    """Slurm starts the job, cannot open its output, and leaves no file: `doctor` knows the signature."""
    job = odd.submit(f"--output={tmp_path}/none/job.log", "--wrap", "true")
    state = odd.wait_for(job, "FAILED")
    assert state["ExitCode"] == "0:53" and not (tmp_path / "none").exists()
    answer = odd.run("python3", "-m", "launch", "doctor", str(job), check=False)
    assert f"{tmp_path}/none" in answer.stdout + answer.stderr and "Traceback" not in answer.stderr


def test_launch_makes_the_folder_of_the_jobs_output(odd, tmp_path):
    answer = launch(odd, tmp_path, "--time", "30:00")
    assert answer.returncode == 0, answer.stderr
    assert odd.wait_for(int(answer.stdout), "COMPLETED", timeout_s=90)["StdOut"].startswith(str(tmp_path))
    assert "rehearsal of attempt 1" in odd.output(int(answer.stdout))


def test_a_node_with_other_gpus_than_the_rest(odd, tmp_path):
    """Slurm takes all nodes for alike; the driver knows better."""
    simulated = tmp_path / "gpus.json"
    simulated.write_text('{"nodes": {"gpu-002-ib0": {"gpu": {"name": "NVIDIA A100-SXM4-80GB"}}}}')
    found = rehearse(odd, tmp_path, SCRIPT_7B, ends="FAILED",
                     variables={"MEGATRON_RL_SIMULATED_GPUS": str(simulated)})
    assert found.state["ExitCode"] == "5:0"
    assert "gpu-002-ib0" in found.output and "A100" in found.output and "H100" in found.output
    assert "rehearsals are not repeated" in found.output and odd.jobs() == []
