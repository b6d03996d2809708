"""The job that follows one with a bad node, on a real Slurm: what it asks for, and what happens where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.health.ledger import Ledger
from launch.slurm.client import Slurm
from launch.slurm.records import JobRecord
from tests.slurm.stub_run import StubRun, alone, side_by_side
from tests.slurm_cluster import SlurmCluster

BAD_GPU = {"gpus": {2: {"ecc_uncorrected": 4}}}
ASKED = ("--constraint=fast", "--nice=7", "--comment=for the paper", "--mail-type=FAIL", "--mail-user=nobody",
         "--gpus-per-node=h100:8", "--mem=900G", "--switches=2@10", "--exclude=h100-[010-012]")
OF_ONE_JOB = {"JobId", "Command", "NodeList", "BatchHost", "Priority", "StdOut", "StdErr", "Partition", "ExcNodeList",
              "ReqNodeList", "JobState", "Reason", "ExitCode", "Scheduler"}
"""Fields in which two jobs differ that ask for the same."""


@pytest.fixture(scope="module")
def partitions(slurm) -> Iterator[None]:
    """One of exactly four nodes, one that will be closed, and nodes with a feature."""
    slurm.run("scontrol", "create", "partition=four", "nodes=h100-[029-032]", "maxtime=60")
    slurm.run("scontrol", "create", "partition=closed", "nodes=h100-[021-024]", "maxtime=60")
    slurm.run("scontrol", "update", "nodename=h100-[001-012]", "availablefeatures=fast", "activefeatures=fast")
    yield
    slurm.run("scontrol", "update", "nodename=h100-[001-012]", "availablefeatures=", "activefeatures=")
    for partition in ("four", "closed"):
        slurm.run("scontrol", "delete", f"partition={partition}")


@pytest.fixture(scope="module")
def runs(slurm, partitions, tmp_path_factory) -> dict[str, StubRun]:
    """Runs when nothing follows any more; `asked` was submitted with options of all kinds."""
    return side_by_side(
        slurm, tmp_path_factory.mktemp("fresh"), last, closed, early,
        alone("asked", 3, steps=3, gpus={"nodes": {"h100-001": BAD_GPU}}, attempts=2,
              options=(*ASKED, "--nodelist=h100-001")))


def last(slurm: SlurmCluster, folder: Path) -> StubRun:
    """In a partition of exactly its four nodes, one of which is killed."""
    run = StubRun(slurm, folder, "last", 4, "run.min_nodes=3", "run.hang_min_s=200", "checkpoint.every=5", steps=20,
                  hold=12)
    run.submit("--partition=four")
    run.at_step(1, 11)
    victim = run.attempt(1).placement().nodes[-1]
    slurm.kill_node(victim)
    run.go()
    slurm.wait_until(lambda: run.state["JobState"] == "COMPLETING", "the leader to see it, and to end the job")
    slurm.mark_down(victim)
    run.ended(2, timeout_s=150)
    return run


def closed(slurm: SlurmCluster, folder: Path) -> StubRun:
    """Its partition takes no more jobs from the nodes."""
    run = StubRun(slurm, folder, "closed", 3, gpus={"nodes": {"h100-021": BAD_GPU}}).submit("--partition=closed")
    slurm.wait_for(run.job, "RUNNING")
    slurm.run("scontrol", "update", "partition=closed", "allocnodes=elsewhere")
    slurm.wait_until(lambda: [past.decision for past in run.history()] == ["requeue"], "the requeue")
    slurm.run("scontrol", "update", "partition=closed", "allocnodes=ALL")
    run.ended(2, timeout_s=150)
    return run


def early(slurm: SlurmCluster, folder: Path) -> StubRun:
    """A node dies before the step has begun."""
    run = StubRun(slurm, folder, "early", 3, steps=3).submit("--nodelist=h100-[013-015]")
    slurm.wait_until(lambda: run.state["JobState"] == "RUNNING", "the job whose node dies at once")
    slurm.kill_node("h100-015")
    run.ended(2, timeout_s=150)
    return run


def test_a_node_lost_where_there_is_no_further_one_the_run_goes_on_smaller(runs):
    run = runs["last"]
    died, finished = run.history()
    assert (died.status, died.decision) == ("node_failure", "fresh") and died.successor == finished.job_id
    assert (finished.status, finished.step) == ("finished", 20)
    assert len(run.given(1)) == 4 and sorted(run.given(2)) == sorted(set(run.given(1)) - set(died.nodes))
    assert "from step 10" in run.text()


def test_where_no_job_may_be_submitted_this_one_is_requeued(runs, slurm):
    run = runs["closed"]
    first, second = run.history()
    assert (first.status, first.nodes, first.decision) == ("preflight", ("h100-021",), "requeue")
    assert "no new job was submitted: " in slurm.output(run.job) and second.job_id == str(run.job)
    assert run.state["Restarts"] == "1" and Ledger(run.folder / "ledger.json").excluded() == ("h100-021",)


def test_a_node_that_dies_before_the_step_has_begun_is_left_out(runs):
    run = runs["early"]
    first, second = run.history()
    assert first.status == "node_failure" and first.nodes == ("h100-015",) and first.decision == "fresh", first.message
    assert "Task launch for StepId" in first.message, "srun says it, before a silence could"
    assert second.status == "finished" and "h100-015" not in run.given(2)


def test_the_fresh_job_asks_for_what_the_first_was_asked_for(runs, slurm):
    """Record against record; what belongs to one job only is named above."""
    run = runs["asked"]
    first, second = run.history()
    assert (first.decision, second.status) == ("fresh", "finished")
    client = Slurm(slurm.environment)
    was, now = (asked_for(client.show_job(past.job_id)) for past in (first, second))
    assert now == was and run.state["Partition"] == "batch"
    assert (was["Features"], was["Nice"], was["Comment"]) == ("fast", "7", "for the paper")
    assert (was["TresPerNode"], was["MinMemoryNode"], was["MailType"]) == ("gres:gpu:h100:8", "900G", "FAIL")
    excluded = client.show_job(second.job_id).excluded
    assert sorted(excluded) == ["h100-001", "h100-010", "h100-011", "h100-012"], "the bad node, and the user's three"


def asked_for(record: JobRecord) -> dict[str, str]:
    return {name: value.strip() for name, value in record.fields.items()
            if name not in OF_ONE_JOB and not name.endswith(("Time", "Eval"))}
