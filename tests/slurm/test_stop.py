"""Everything that asks a job to stop on a real Slurm meets in one step boundary, with a checkpoint."""

from __future__ import annotations

import sys

import pytest

from launch.runtime.stop_file import stop_reason
from launch.runtime.stub import newest_step
from tests.slurm.stub_run import StubRun


@pytest.fixture(scope="module")
def stops(slurm, tmp_path_factory) -> dict[str, StubRun]:
    """Runs that were asked to stop, each in its way, when nothing follows any more."""
    folder = tmp_path_factory.mktemp("stops")
    (folder / "profile.yaml").write_text("refuses: [signal]\n")       # the leader's own deadline has to do
    limit = StubRun(slurm, folder, "limit", 2, f"run.profile={folder}/profile.yaml", "run.stop_margin_s=105",
                    "checkpoint.every=0", steps=90, step_s=0.2, time="2:00")
    step, batch, user = (StubRun(slurm, folder, name, 2, steps=1000, step_s=0.2) for name in ("step", "batch", "user"))
    over = StubRun(slurm, folder, "over", 2, "checkpoint.every=1", "run.hang_min_s=300", steps=1000, step_s=0.2,
                   fault="trainer-1:step:6:sleep")          # a step that never ends
    for run in (limit, step, batch, user, over):
        run.submit()
    for run in (step, batch, user):
        run.at_step(1, 3)
    over.at_step(1, 5)
    asked_late(slurm, over)
    slurm.run("scancel", "--signal=USR1", str(step.job))
    slurm.run("scancel", "--batch", "--signal=USR1", str(batch.job))
    slurm.run(sys.executable, "-m", "launch", "stop", str(user.folder))
    slurm.wait_until(lambda: len(step.history()) == 1, "the first attempt's line")
    slurm.run("scancel", str(step.job))
    slurm.wait_for(batch.job, "RUNNING", restarts=1)
    batch.at_step(2, batch.history()[0].step + 2)
    slurm.run("scancel", str(batch.job))
    slurm.wait_for(over.job, "PENDING", "RUNNING", restarts=1, timeout_s=90)
    slurm.run("scontrol", "update", f"jobid={over.job}", "timelimit=10")
    over.slurm.wait_until(lambda: "from step 5" in over.text(), "the second attempt to go on", 60)
    slurm.run("scancel", str(over.job))
    for run, attempts in ((step, 1), (user, 1), (batch, 2), (over, 2), (limit, 2)):
        run.ended(attempts, timeout_s=150)
    return {run.name: run for run in (limit, step, batch, user, over)}


def asked_late(slurm, run: StubRun) -> None:
    """The time limit comes near: the run is asked to stop, and Slurm ends it before it can."""
    slurm.run("scontrol", "update", f"jobid={run.job}", "timelimit=1")
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))


def test_the_time_limit_leads_to_a_checkpoint_a_requeue_and_a_resume(stops):
    """Without Slurm's signal: by the leader's own deadline."""
    run = stops["limit"]
    assert "--signal" not in run.script.read_text()
    *stopped, finished = run.history()
    assert stopped and finished.status == "finished" and finished.step == 90
    for past in stopped:
        assert (past.status, past.stop_reason, past.decision, past.exit_code) == ("stopped", "time-limit", "requeue", 0)
        assert past.job_id == str(run.job) and past.progress
    assert f"from step {stopped[0].step}" in run.text(), "nothing was saved but at the stop"
    assert run.state["JobState"] == "COMPLETED" and len(stopped) == int(run.state["Restarts"])


def test_a_step_that_overruns_the_time_limit_costs_its_work_and_not_the_run(stops, slurm):
    run = stops["over"]
    ended, _ = run.history()
    assert (ended.status, ended.stop_reason, ended.decision, ended.step) == ("interrupted", "time-limit", "requeue", 5)
    assert "too short for the step and the checkpoint: raise run.stop_margin_s" in ended.message
    assert "ended by Slurm before the checkpoint for time-limit was complete" in slurm.output(run.job)


def test_a_signal_to_the_step_is_a_request_to_stop(stops):
    """It reaches every process of the step, those without a handler too: nobody dies of it."""
    run = stops["step"]
    past = run.history()[0]
    assert (past.status, past.stop_reason, past.decision) == ("stopped", "signal", "requeue")
    assert newest_step(run.attempt(1).checkpoints) == past.step >= 3


def test_a_signal_to_the_batch_script_reaches_the_leader_and_a_cancelled_job_stays_so(stops):
    """The batch shell has become the leader by exec. Who cancels a job does not want it back."""
    run = stops["batch"]
    signalled, cancelled = run.history()
    assert (signalled.status, signalled.stop_reason, signalled.decision) == ("stopped", "signal", "requeue")
    assert cancelled.decision == "stop"
    assert run.state["JobState"] == "CANCELLED" and run.state["Restarts"] == "1"


def test_srun_ends_by_itself_after_the_outcome(stops):
    """Killed, it would take the ranks that save with it, and would say so."""
    for run in stops.values():
        for past in run.history():
            if past.status in ("stopped", "finished"):
                attempt = run.attempt(past.attempt)
                assert (attempt.logs / "srun.log").read_text() == "", run.name
                ended = (attempt.folder / "end").stat().st_mtime
                for folder in (attempt.folder / "nodes").iterdir():
                    assert (folder / "gone").stat().st_mtime >= ended


def test_megatron_rl_stop_ends_the_run_for_good(stops):
    run = stops["user"]
    past, = run.history()
    assert stop_reason(run.attempt(1).folder) == "user" and run.state["JobState"] == "COMPLETED"
    assert (past.status, past.decision, past.exit_code) == ("stopped", "stop", 0)
    assert newest_step(run.attempt(1).checkpoints) == past.step
