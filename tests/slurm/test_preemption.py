"""A job that Slurm takes its nodes away from, with a grace time: it writes a checkpoint, is requeued, and goes on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.run.stop import stop_reason
from tests.launcher_stub.process import newest_step
from tests.slurm.stub_run import StubRun
from tests.slurm_cluster import Group, requires_slurm, running

GRACE_S = 60
SETTINGS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=h100-[001-002] PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=h100-[001-002] PriorityTier=10
{more}"""
SIGNALS = {"TERM": "", "user-signal": "SlurmctldParameters=preempt_send_user_signal"}
"""From Slurm 23.02 on the second is `PreemptParameters=send_user_signal`."""


@pytest.fixture(scope="module")
def preempted(tmp_path_factory) -> dict[str, StubRun]:
    """A run on a cluster of each kind, side by side, when nothing follows any more: they wait for Slurm."""
    with ThreadPoolExecutor(len(SIGNALS)) as pool:
        going = {name: pool.submit(_preempt, tmp_path_factory.mktemp(name), more) for name, more in SIGNALS.items()}
    return {name: each.result() for name, each in going.items()}


def _preempt(folder: Path, more: str) -> StubRun:
    with running([Group("h100", 2)], settings=SETTINGS.format(grace=GRACE_S, more=more)) as slurm:
        run = StubRun(slurm, folder, "low", 2, "checkpoint.every=0", "run.stop_margin_s=70", steps=60, step_s=0.2)
        run.submit("--partition=low")
        run.at_step(1, 3)
        high = slurm.submit("--partition=high", "--nodes=2", "--exclusive", f"--output={folder}/high", "--wrap",
                            "sleep 2")
        slurm.wait_for(high, "COMPLETED", timeout_s=GRACE_S)
        run.ended(2)
    return run


@requires_slurm
@pytest.mark.parametrize("signal", SIGNALS)
def test_a_preempted_job_saves_is_requeued_and_resumes(preempted, signal):
    """Without the user's signal every process of the step gets TERM, those that compute as well."""
    run = preempted[signal]
    stopped, finished = run.history()
    assert stop_reason(run.attempt(1).folder) == "preemption"
    assert (stopped.status, stopped.stop_reason, stopped.decision) == ("stopped", "preemption", "requeue")
    assert newest_step(run.attempt(1).checkpoints) == 60 and stopped.step >= 3
    assert f"from step {stopped.step}" in run.text(), "the step that was saved in the grace time"
    assert (finished.status, finished.step) == ("finished", 60)
    detail = json.loads((run.attempt(1).folder / "stop-reason.json").read_text())["detail"]
    assert detail.startswith("SIGUSR1" if signal == "user-signal" else "SIGTERM"), detail
    told = "before Slurm takes the nodes" if signal == "user-signal" else "preempted: Slurm ends this job in"
    assert told in run.text()
