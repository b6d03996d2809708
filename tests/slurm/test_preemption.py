"""A job that Slurm takes its nodes away from, with a grace time: it writes a checkpoint, is requeued, and goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from launch.run.stop import stop_reason
from tests.launcher_stub.process import newest_step
from tests.slurm.stub_run import StubRun
from tests.slurm_cluster import Group, SlurmCluster, running

GRACE_S = 60
SETTINGS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=h100-[001-002] PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=h100-[001-002] PriorityTier=10
{more}"""
USER_SIGNAL = "SlurmctldParameters=preempt_send_user_signal"
"""From Slurm 23.02 on it is `PreemptParameters=send_user_signal`."""


@pytest.fixture(scope="module", params=["", USER_SIGNAL], ids=["TERM", "user-signal"])
def preempting(request) -> Iterator[SlurmCluster]:
    with running([Group("h100", 2)], settings=SETTINGS.format(grace=GRACE_S, more=request.param)) as cluster:
        cluster.user_signal = bool(request.param)
        yield cluster


def test_a_preempted_job_saves_is_requeued_and_resumes(preempting, tmp_path):
    """Without the user's signal every process of the step gets TERM, those that compute as well."""
    run = StubRun(preempting, tmp_path, "low", 2, "checkpoint.every=0", "run.stop_margin_s=70", steps=60, step_s=0.2)
    run.submit("--partition=low")
    run.at_step(1, 3)
    high = preempting.submit("--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/high", "--wrap",
                             "sleep 2")
    preempting.wait_for(high, "COMPLETED", timeout_s=GRACE_S)
    stopped, finished = run.ended(2)
    assert stop_reason(run.attempt(1).folder) == "preemption"
    assert (stopped.status, stopped.stop_reason, stopped.decision) == ("stopped", "preemption", "requeue")
    assert newest_step(run.attempt(1).checkpoints) == 60 and stopped.step >= 3
    assert f"from step {stopped.step}" in run.text(), "the step that was saved in the grace time"
    assert (finished.status, finished.step) == ("finished", 60)
    detail = json.loads((run.attempt(1).folder / "stop-reason.json").read_text())["detail"]
    assert detail.startswith("SIGUSR1" if preempting.user_signal else "SIGTERM"), detail
    told = "before Slurm takes the nodes" if preempting.user_signal else "preempted: Slurm ends this job in"
    assert told in run.text()
