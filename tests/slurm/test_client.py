"""The client of Slurm: what it reads, what it refuses, what it tells of a refusal. The texts are Slurm's own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.slurm import job_facts
from launch.slurm.client import Slurm, scrubbed
from launch.slurm.records import estimate_of, job_records, moment
from launch.slurm.refusals import explain, names
from tests.slurm_cluster import SlurmCluster

RUNNING = """\
JobId=7 JobName=grpo 70b
   UserId=alice(1000) GroupId=alice(1000) MCS_label=N/A
   Priority=4294901758 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:53
   RunTime=00:00:05 TimeLimit=00:30:00 TimeMin=N/A
   SubmitTime=1790000000 EligibleTime=1790000000
   StartTime=1790000000 EndTime=1790001800 Deadline=N/A
   PreemptEligibleTime=1790000000 PreemptTime=None
   Partition=batch AllocNode:Sid=login:4242
   ReqNodeList=(null) ExcNodeList=h100-[003-004],h100-009
   NodeList=h100-[001-002]
   BatchHost=h100-001
   NumNodes=2-2 NumCPUs=192 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=/home/alice/my runs/grpo.sbatch run.steps=500 cluster=c.yaml Partition=x
   WorkDir=/home/alice/my runs
   Comment=megatron-rl:plan:0123456789abcdef
   StdOut=/home/alice/my runs/grpo-7.log
"""


def test_a_job_as_scontrol_prints_it():
    job, = job_records(RUNNING)
    assert (job.job_id, job.name, job.state, job.reason) == ("7", "grpo 70b", "RUNNING", "")
    assert job.partition == "batch" and job.account == "" and job.qos == ""
    assert job.nodes == ("h100-001", "h100-002") and job.node_count == 2
    assert job.excluded == ("h100-003", "h100-004", "h100-009")
    assert (job.started, job.ends, job.time_limit) == (1790000000, 1790001800, "00:30:00")
    assert job.requeue and job.restarts == 2 and (job.exit_code, job.signal) == (0, 53)
    assert job.command.endswith("grpo.sbatch run.steps=500 cluster=c.yaml Partition=x")     # not the next fields
    assert job.work_dir == "/home/alice/my runs" and job.comment == "megatron-rl:plan:0123456789abcdef"


def test_an_array_has_a_record_a_task():
    second = RUNNING.replace("JobId=7 ", "JobId=8 ArrayJobId=7 ArrayTaskId=1 ")
    assert [job.job_id for job in job_records(RUNNING + "\n" + second)] == ["7", "8"]


@pytest.mark.parametrize(("text", "seconds"), [("1790000000", 1790000000), ("Unknown", None), ("N/A", None),
                                               ("", None)])
def test_moments(text, seconds):
    assert moment(text) == seconds


def test_a_moment_as_slurm_writes_it_without_our_wish(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert moment("2026-09-21T14:13:20") == 1790000000


def test_an_estimate():
    text = ("Job 5 to start at 1790000000 using 3072 processors on nodes h100-[001-032] in partition batch")
    estimate = estimate_of(text)
    assert len(estimate.nodes) == 32 and estimate.starts == 1790000000 and estimate.partition == "batch"
    assert estimate_of("allocation accepted").starts is None


def test_variables_that_would_change_a_submission_are_dropped_and_named():
    kept, dropped = scrubbed({"PATH": "/bin", "SBATCH_TIMELIMIT": "33", "SLURM_JOB_ID": "1", "SLURM_CONF": "/c",
                              "SRUN_CPUS_PER_TASK": "1", "SQUEUE_FORMAT": "%i", "SALLOC_ACCOUNT": "x"})
    assert dropped == ("SALLOC_ACCOUNT", "SBATCH_TIMELIMIT", "SLURM_JOB_ID", "SQUEUE_FORMAT", "SRUN_CPUS_PER_TASK")
    assert kept == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_TIME_FORMAT": "%s"}


@pytest.mark.parametrize(("text", "row", "remedy"), [
    ("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid "
     "partition name specified", "partition", "sinfo -s"),
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
     "account", "--account"),
    ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
     "time limit", "shorter --time"),
    ("sbatch: unrecognized option '--segment=4'\nTry \"sbatch --help\" for more information", "unknown option",
     "no --segment"),
    ("sbatch: unrecognized option '--gpus-per-node=8'", "unknown option", "set gpus: gres"),
    ("sbatch: error: Invalid generic resource (gres) specification", "gpus", "gpus: gres"),
    ("sbatch: error: Memory specification can not be satisfied", "memory", "put mem under refuses"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "nodes",
     "fewer nodes"),
    ("slurm_load_jobs error: Invalid job id specified", "job id", "squeue --me"),
    ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", "no controller", "scontrol ping"),
    ("Slurm accounting storage is disabled", "accounting off", "outcome.json")])
def test_every_known_refusal_has_a_remedy(text, row, remedy):
    error = explain("sbatch x", 1, text)
    assert error.exit_code == ExitCode.SLURM and remedy in error.fix and row in names(error)
    assert "sbatch: error" not in error.what and "`sbatch x`, status 1" == error.where


def test_a_sites_own_filter_that_names_an_option():
    error = explain("sbatch x", 1, "sbatch: error: --exclusive is not allowed on this system, ask for CPUs")
    assert "put exclusive under refuses" in error.fix
    assert "scontrol ping" in explain("sbatch x", 1, "").fix


def test_without_slurm(tmp_path):
    with pytest.raises(UserError, match="cannot run scontrol") as error:
        Slurm({"PATH": str(tmp_path)}).show_job("1")
    assert error.value.exit_code == ExitCode.SLURM and "login node" in error.value.fix


# a real Slurm


def test_a_real_job(slurm: SlurmCluster, tmp_path):
    client = Slurm(slurm.environment)
    script = tmp_path / "wait.sh"
    script.write_text("#!/bin/bash\nexec sleep 300\n")
    options = ["--nodes=3", "--exclude=h100-[001-002]", "--comment=megatron-rl:plan:00ff", "--time=11", "--exclusive",
               f"--output={tmp_path}/%j.log"]
    estimate = client.test_only(script, options=options)
    assert len(estimate.nodes) == 3 and abs(estimate.starts - time.time()) < 600
    job_id = client.submit(script, ["a=1", "b c"], options, cwd=tmp_path)
    slurm.wait_for(int(job_id), "RUNNING")
    before = len(client.calls)
    job = client.show_job(job_id)
    assert len(client.calls) == before + 1
    assert job.state == "RUNNING" and job.node_count == len(job.nodes) == 3 and not set(job.nodes) & set(job.excluded)
    assert job.excluded == ("h100-001", "h100-002") and job.comment == "megatron-rl:plan:00ff"
    assert job.command == f"{script} a=1 b c" and job.work_dir == str(tmp_path) and job.requeue and job.restarts == 0
    assert 600 < job.ends - time.time() < 660 + 5
    states = {node.name: node.states[0] for node in client.nodes()}
    assert len(states) == 32 and {states[name] for name in job.nodes} == {"ALLOCATED"}
    assert [node.name for node in client.nodes(job.nodes)] == list(job.nodes)
    queued, = [each for each in client.queue() if each.job_id == job_id]
    assert queued.state == "RUNNING" and not queued.of_array
    client.requeue(job_id)
    assert client.show_job(job_id).restarts == 1
    client.cancel(job_id)
    slurm.wait_for(int(job_id), "CANCELLED")
    assert client.show_job(job_id).state == "CANCELLED"


def test_refusals_of_a_real_slurm(slurm: SlurmCluster, tmp_path):
    """Slurm's texts change with its version: here they are those of the one that is installed."""
    client = Slurm(slurm.environment)
    script = tmp_path / "x.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    for options, row in ((["--partition=nope"], "partition"), (["--frobnicate=4"], "unknown option"),
                         (["--nodes=33"], "nodes"), (["--exclude=nope-1"], "node name"),
                         (["--gres=frob:8"], "gpus"), (["--gpus-per-node=b200:8"], "nodes")):
        with pytest.raises(UserError) as error:
            client.test_only(script, options=options)
        assert row in names(error.value) and error.value.exit_code == ExitCode.SLURM, error.value
    for call, row in ((lambda: client.show_job("999999"), "job id"), (lambda: client.requeue("999999"), "job id"),
                      (lambda: client.cancel("999999", signal="USR1"), "job id"),
                      (lambda: client.batch_script("999999"), "job id"),
                      (lambda: client.account("1"), "accounting off")):
        with pytest.raises(UserError) as error:
            call()
        assert row in names(error.value), error.value
    with pytest.raises(UserError, match="Node nope not found") as error:
        client.nodes(["nope"])
    assert "sinfo -N" in error.value.fix


def without_controller(slurm: SlurmCluster, folder: Path) -> Path:
    """A slurm.conf whose controller listens nowhere."""
    text = Path(slurm.environment["SLURM_CONF"]).read_text(encoding="utf-8")
    port = next(line for line in text.splitlines() if line.startswith("SlurmctldPort="))
    conf = folder / "slurm.conf"
    conf.write_text(text.replace(port, "SlurmctldPort=1") + "\nMessageTimeout=2\n")
    return conf


def test_no_controller(slurm: SlurmCluster, tmp_path):
    with pytest.raises(UserError) as error:
        Slurm({**slurm.environment, "SLURM_CONF": str(without_controller(slurm, tmp_path))}).queue()
    assert "no controller" in names(error.value) and "scontrol ping" in error.value.fix


def test_facts_of_a_job(slurm: SlurmCluster, tmp_path):
    """Read inside the job, on its first node: from the environment and one question."""
    script = tmp_path / "facts.sh"
    script.write_text("#!/bin/bash\nexec python3 -c 'from launch.slurm.client import Slurm; "
                      "from launch.slurm.job_facts import read; client = Slurm(); "
                      "print(read(client).model_dump_json()); print(len(client.calls))'\n")
    job_id = slurm.submit("--nodes=4", "--exclusive", "--gpus-per-node=8", "--time=10", f"--output={tmp_path}/log",
                          str(script))
    slurm.wait_for(job_id, "COMPLETED")
    text, rpcs = (tmp_path / "log").read_text().splitlines()
    facts = job_facts.JobFacts.model_validate_json(text)
    assert facts.job_id == str(job_id) and len(facts.nodes) == 4 and facts.first_node == facts.nodes[0]
    assert (facts.cpus_per_node, facts.gpus_per_node, facts.partition) == (96, 8, "batch")
    assert 0 < facts.end_time - time.time() <= 600 and facts.restart_count == 0 and facts.requeue
    assert rpcs == "1"


def test_facts_outside_a_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError, match="not a Slurm job"):
        job_facts.read(Slurm({}))


def test_a_node_list_that_contradicts_the_number_of_nodes(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h100-[001-003]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    with pytest.raises(UserError, match="names 3 nodes, but the job has 4"):
        job_facts.combine(job_records(RUNNING)[0])
