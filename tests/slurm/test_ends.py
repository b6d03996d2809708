"""How attempts end on a real Slurm, and what follows: by themselves (crashes, hangs, broken hardware), and when they
are asked to stop, which all meets in one step boundary, with a checkpoint."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from launch.health.ledger import Ledger
from launch.run.components import component
from launch.run.stop import stop_reason
from tests.launcher_stub.process import newest_step
from tests.patience import patient
from tests.slurm.stub_run import StubRun, alone, side_by_side
from tests.slurm_cluster import SlurmCluster

BAD_GPU = {"gpus": {2: {"ecc_uncorrected": 4}}}


@pytest.fixture(scope="module")
def ends(slurm, tmp_path_factory) -> dict[str, StubRun]:
    """Runs when nothing follows any more. The time of `limit` goes from its start on: the others begin later."""
    folder = tmp_path_factory.mktemp("ends")
    limit = with_a_time_limit(slurm, folder)
    runs = side_by_side(
        slurm, folder, overrun, step_signal, batch_signal, user_stop, break_a_gpu,
        alone("exit", 2, "checkpoint.every=2", fault="trainer-1:step:5:exit", attempts=3),
        alone("raise", 2, fault="trainer-1:step:1:raise", attempts=2),
        alone("sleep", 3, "run.max_attempts=1", fault="trainer-2:step:4:sleep"))
    limit.ended(2, timeout_s=150)
    return {**runs, limit.name: limit}


def break_a_gpu(slurm: SlurmCluster, folder: Path) -> StubRun:
    """A GPU of the third node counts errors while the job runs, then the rank of the second dies."""
    run = StubRun(slurm, folder, "broken", 3, f"run.hang_min_s={patient(200)}", "checkpoint.every=3", gpus={},
                  hold=8).submit()
    run.at_step(1, 7)
    run.find({"nodes": {run.node_of(1, "trainer-2"): BAD_GPU}})
    psutil.Process(component(run.attempt(1), "trainer-1").process.pid).kill()
    run.go()
    run.ended(2)
    return run


def with_a_time_limit(slurm: SlurmCluster, folder: Path) -> StubRun:
    """Without Slurm's signal: the leader's own deadline has to do. Two attempts of fifteen seconds make more steps than
    one can."""
    (folder / "profile.yaml").write_text("refuses: [signal]\n")
    run = StubRun(slurm, folder, "limit", 2, f"run.profile={folder}/profile.yaml",
                  f"run.stop_margin_s={240 - min(120, patient(15))}", "checkpoint.every=0", steps=round(patient(90)),
                  step_s=0.2, time="4:00").submit()
    run.at_step(1, 1)
    return run


def overrun(slurm: SlurmCluster, folder: Path) -> StubRun:
    """A step that never ends. It is asked to stop as the time limit comes near, and Slurm ends it before it can."""
    run = StubRun(slurm, folder, "over", 2, "checkpoint.every=1", f"run.hang_min_s={patient(300)}", steps=1000,
                  step_s=0.2, fault="trainer-1:step:6:sleep").submit()
    run.at_step(1, 5)
    end = datetime.now() + timedelta(seconds=2)
    slurm.run("scontrol", "update", f"jobid={run.job}", f"endtime={end:%Y-%m-%dT%H:%M:%S}")
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))
    slurm.wait_for(run.job, "PENDING", "RUNNING", restarts=1, timeout_s=90)
    slurm.run("scontrol", "update", f"jobid={run.job}", "timelimit=10")
    slurm.wait_until(lambda: "from step 5" in run.text(), "the second attempt to go on", 60)
    slurm.run("scancel", str(run.job))
    run.ended(2)
    return run


def step_signal(slurm: SlurmCluster, folder: Path) -> StubRun:
    run = StubRun(slurm, folder, "step", 2, steps=1000, step_s=0.2).submit()
    run.at_step(1, 3)
    slurm.run("scancel", "--signal=USR1", str(run.job))
    slurm.wait_until(lambda: len(run.history()) == 1, "the first attempt's line")
    slurm.run("scancel", str(run.job))
    run.ended(1)
    return run


def batch_signal(slurm: SlurmCluster, folder: Path) -> StubRun:
    """Signalled, and when it goes on, cancelled."""
    run = StubRun(slurm, folder, "batch", 2, steps=1000, step_s=0.2).submit()
    run.at_step(1, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", str(run.job))
    slurm.wait_for(run.job, "RUNNING", restarts=1)
    run.at_step(2, run.history()[0].step + 2)
    slurm.run("scancel", str(run.job))
    run.ended(2)
    return run


def user_stop(slurm: SlurmCluster, folder: Path) -> StubRun:
    run = StubRun(slurm, folder, "user", 2, steps=1000, step_s=0.2).submit()
    run.at_step(1, 3)
    slurm.run(sys.executable, "-m", "launch", "stop", str(run.folder))
    run.ended(1)
    return run


# ---- by themselves --------------------------------------------------------------------------------------------------

def test_a_rank_that_crashes_at_once_is_shown_and_stops_after_the_second_attempt(ends, slurm):
    """No black hole: requeued once, then never again."""
    run = ends["raise"]
    first, second = run.history()
    assert (first.status, first.decision, first.exit_code) == ("crash", "requeue", 70)
    assert (second.status, second.decision, second.exit_code) == ("crash", "stop", 93)
    assert run.state["ExitCode"] == "93:0" and run.state["Restarts"] == "1"
    assert second.component == "trainer-1" and second.nodes == (run.node_of(2, "trainer-1"),)
    assert "trainer-1 failed first: RuntimeError: fault requested" in slurm.output(run.job)
    assert str(run.attempt(1).logs / "trainer-1.log") in slurm.output(run.job)


def test_a_rank_that_dies_without_a_word_at_the_same_step_makes_no_progress(ends, slurm):
    run = ends["exit"]
    assert [(past.step, past.progress, past.decision) for past in run.history()] == [
        (4, True, "requeue"), (4, False, "requeue"), (4, False, "stop")]
    last = run.history()[-1]
    assert last.exit_code == 93 and (last.status, last.component) == ("crash", "trainer-1")
    assert "died without an error of its own" in slurm.output(run.job)


def test_a_hang_names_the_rank_that_never_arrived_and_its_node(ends, slurm):
    run = ends["sleep"]
    past, = run.history()
    assert (past.status, past.step, past.component, past.nodes) == (
        "hang", 3, "trainer-2", (run.node_of(1, "trainer-2"),))
    assert run.state["ExitCode"] == "75:0" and "run.max_attempts" in past.why
    assert "never arrived: trainer-2" in slurm.output(run.job)
    stacks = run.attempt(1).folder / "stacks"
    assert "faults.py" in (stacks / "trainer-2.txt").read_text()
    assert "files/waiting.py" in (stacks / "trainer-0.txt").read_text()


def test_a_gpu_that_broke_while_the_job_ran_is_found_after_the_crash_and_its_node_left_out(ends):
    """The node with the broken GPU is to blame, not the one whose rank died."""
    run = ends["broken"]
    fault, finished = run.history()
    victim = run.node_of(1, "trainer-2")
    assert (fault.status, fault.nodes, fault.decision, fault.exit_code) == ("hardware_fault", (victim,), "fresh", 76)
    assert fault.message.startswith(f"{victim}: gpu.ecc: ") and "seen as: trainer-1 (pid" in fault.message
    evidence = {file.parent.name: critical(file) for file in run.attempt(1).folder.glob("nodes/*/aftermath.json")}
    assert evidence == {node: ["gpu.ecc"] if node == victim else [] for node in run.given(1)}
    entry, = Ledger(run.folder / "ledger.json").entries()
    assert entry.node == victim and entry.reason.startswith(f"hardware fault: {victim}: gpu.ecc: ")
    assert entry.evidence == str(run.attempt(1).folder / f"nodes/{victim}/aftermath.json")
    assert fault.excluded == (victim,) and victim not in run.given(2) and finished.job_id == fault.successor
    assert (finished.status, finished.step) == ("finished", 10) and "from step 6" in run.text()


def critical(file) -> list[str]:
    """Names of the checks that a node's report calls critical."""
    return [check["check"] for check in json.loads(file.read_text()) if check["severity"] == "critical"]


# ---- asked to stop --------------------------------------------------------------------------------------------------

def test_the_time_limit_leads_to_a_checkpoint_a_requeue_and_a_resume(ends):
    """Without Slurm's signal: by the leader's own deadline."""
    run = ends["limit"]
    assert "--signal" not in run.script.read_text()
    *stopped, finished = run.history()
    assert stopped and finished.status == "finished" and finished.step == round(patient(90))
    for past in stopped:
        assert (past.status, past.stop_reason, past.decision, past.exit_code) == ("stopped", "time-limit", "requeue", 0)
        assert past.job_id == str(run.job) and past.progress
    assert f"from step {stopped[0].step}" in run.text(), "nothing was saved but at the stop"
    assert run.state["JobState"] == "COMPLETED" and len(stopped) == int(run.state["Restarts"])


def test_a_step_that_overruns_the_time_limit_costs_its_work_and_not_the_run(ends, slurm):
    run = ends["over"]
    ended, _ = run.history()
    assert (ended.status, ended.stop_reason, ended.decision, ended.step) == ("interrupted", "time-limit", "requeue", 5)
    assert "too late for the step and the checkpoint: raise run.stop_margin_s" in ended.message
    assert "ended by Slurm before the checkpoint for time-limit was complete" in slurm.output(run.job)


def test_a_signal_to_the_step_is_a_request_to_stop(ends):
    """It reaches every process of the step, those without a handler too: nobody dies of it."""
    run = ends["step"]
    past = run.history()[0]
    assert (past.status, past.stop_reason, past.decision) == ("stopped", "signal", "requeue")
    assert newest_step(run.attempt(1).checkpoints) == past.step >= 3


def test_a_signal_to_the_batch_script_reaches_the_leader_and_a_cancelled_job_stays_so(ends):
    """The batch shell has become the leader by exec. A user who cancels a job does not want it back."""
    run = ends["batch"]
    signalled, cancelled = run.history()
    assert (signalled.status, signalled.stop_reason, signalled.decision) == ("stopped", "signal", "requeue")
    assert cancelled.decision == "stop"
    assert run.state["JobState"] == "CANCELLED" and run.state["Restarts"] == "1"


def test_srun_ends_by_itself_after_the_outcome(ends):
    """Killed, it would take the ranks that save with it, and would say so."""
    for run in ends.values():
        for past in run.history():
            if past.status in ("stopped", "finished"):
                attempt = run.attempt(past.attempt)
                assert (attempt.logs / "srun.log").read_text() == "", run.name
                ended = (attempt.folder / "end").stat().st_mtime
                for folder in (attempt.folder / "nodes").iterdir():
                    assert (folder / "gone").stat().st_mtime >= ended


def test_megatron_rl_stop_ends_the_run_for_good(ends):
    run = ends["user"]
    past, = run.history()
    assert stop_reason(run.attempt(1).folder) == "user" and run.state["JobState"] == "COMPLETED"
    assert (past.status, past.decision, past.exit_code) == ("stopped", "stop", 0)
    assert newest_step(run.attempt(1).checkpoints) == past.step
