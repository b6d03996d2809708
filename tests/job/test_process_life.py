"""A job's processes: whenever and however a job is stopped, all of them end. They are counted from outside, without
the mark by which the project itself finds them (tests/job/survivors.py). Elsewhere: a second Ctrl-C
(test_real_model.py) and `megatron-rl stop` (test_engines_die.py)."""

from __future__ import annotations

import signal

import psutil
import pytest

from launch.exit_codes import ExitCode
from launch.run.components import components
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.runner import Launched, launch
from tests.job.survivors import family
from tests.patience import patient

ENDLESS = ("run.steps=1000", "trainer.tp=1", "trainer.pp=1", "checkpoint.every=0")
COMPONENTS = {"driver", "trainer-0", "rollout-0", "reward-0"}


@pytest.fixture
def processes():
    with family() as started:
        yield started


def started_all(job: Launched) -> None:
    """Wait until every component has a process; none is ready yet."""
    job.until(lambda: {record.name for record in components(job.attempt)} == COMPONENTS, "all components")


def saved(job: Launched) -> list[str]:
    return [folder.name for folder in complete_checkpoints(job.attempt.checkpoints)]


def test_sigterm_during_start_up_ends_at_once(tmp_path, processes):
    job = launch(tmp_path, "early", *ENDLESS)
    started_all(job)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(patient(20)) == ExitCode.OK, job.text()
    assert processes.left(within_s=0) == []
    assert (job.outcome().status, job.outcome().step) == ("stopped", 0)
    assert "no step was trained" in job.text() and saved(job) == [] and job.rows() == []


def test_nothing_survives_the_launcher(tmp_path, processes):
    job = launch(tmp_path, "orphan", *ENDLESS)
    started_all(job)
    engine = psutil.Process(job.component("rollout-0").process.pid)
    job.until(lambda: bool(engine.children()), "vLLM's own process")
    job.process.kill()
    job.process.wait(patient(10))
    assert processes.left(within_s=20) == []
