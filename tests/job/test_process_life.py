"""A job's processes: stopped at any time, by any way, they all end; they are counted from outside (tests/job/survivors)."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from launch.exit_codes import ExitCode
from launch.runtime.components import components
from megatron_rl.trainer.checkpoint_files import complete_checkpoints
from tests.job.runner import Launched, launch
from tests.job.survivors import family

ENDLESS = ("run.steps=1000", "trainer.tp=1", "trainer.pp=1", "checkpoint.every=0")
COMPONENTS = {"driver", "trainer-0", "rollout-0", "reward-0"}


@pytest.fixture
def processes():
    with family() as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def started_all(job: Launched) -> None:
    """Wait until every component has a process; none is ready yet."""
    job.until(lambda: {record.name for record in components(job.attempt)} == COMPONENTS, "all components")


def saved(job: Launched) -> list[str]:
    return [folder.name for folder in complete_checkpoints(job.attempt.checkpoints)]


def test_sigterm_during_start_up_ends_with_a_checkpoint(runs, processes):
    job = launch(runs, "life", *ENDLESS)
    started_all(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(120) == ExitCode.OK, job.text()
    assert processes.left(within_s=0) == []
    assert (job.outcome().status, job.outcome().step) == ("stopped", 0)
    assert saved(job) == ["step-000000"]


def test_stop_command_ends_a_live_job_with_a_checkpoint(runs, processes):
    """Goes on from the checkpoint that the stop during start-up has left."""
    job = launch(runs, "life", *ENDLESS, attempt=2)
    job.at_step(1)
    told = subprocess.run([sys.executable, "-m", "launch", "stop", "life", "--dir", str(runs)], capture_output=True,
                          text=True, check=True)
    assert str(job.attempt.folder / "stop") in told.stdout
    assert job.process.wait(120) == ExitCode.OK, job.text()
    assert processes.left(within_s=0) == []
    outcome = job.outcome()
    assert outcome.status == "stopped" and outcome.step == job.rows()[-1]["step"] >= 1
    assert job.rows()[0]["step"] == 1
    assert saved(job)[-1] == f"step-{outcome.step:06d}"


def test_a_second_ctrl_c_ends_at_once_without_a_checkpoint(runs, processes):
    before = saved(launched := launch(runs, "life", *ENDLESS, attempt=3))
    started_all(launched)
    launched.process.send_signal(signal.SIGINT)
    launched.until(lambda: "again to end at once" in launched.text(), "the answer to the first Ctrl-C")
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(30) == ExitCode.INTERRUPTED, launched.text()
    assert processes.left(within_s=0) == []
    assert launched.outcome().status == "interrupted" and saved(launched) == before
    assert "Traceback" not in launched.text()


def test_nothing_survives_the_launcher(runs, processes):
    job = launch(runs, "orphan", *ENDLESS)
    job.at_step(1)
    assert len(processes.alive()) > len(COMPONENTS)
    job.process.kill()
    job.process.wait(10)
    assert processes.left(within_s=20) == []
