"""What a job does when something breaks: it ends soon, names the culprit and its log, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from launch.exit_codes import ExitCode
from launch.run.progress import read_progress
from launch.runtime.hang import stack_file
from tests.job.runner import launch
from tests.patience import patient

SMALL = ("run.steps=1000", "trainer.tp=1", "trainer.pp=2")
"""Two ranks start faster than four."""


@pytest.mark.parametrize("victim", ["trainer-1", "rollout-0"])
def test_death_of_a_component_ends_the_job_and_names_it(victim, tmp_path):
    job = launch(tmp_path, "death", *SMALL)
    job.at_step(1)
    os.kill(job.component(victim).process.pid, signal.SIGKILL)
    killed = time.monotonic()
    assert job.end() == ExitCode.CRASH
    assert time.monotonic() - killed < patient(30)
    assert job.outcome().component == victim
    assert victim in job.text() and job.component(victim).log in job.text()
    assert "Traceback" not in job.text().split(victim)[0]


def test_death_of_the_engine_core_names_the_engine(tmp_path):
    job = launch(tmp_path, "core", *SMALL)
    job.at_step(1)
    for child in psutil.Process(job.component("rollout-0").process.pid).children(recursive=True):
        child.kill()
    assert job.end() == ExitCode.CRASH
    assert job.outcome().component == "rollout-0", job.text()


def test_a_death_is_noticed_while_nobody_needs_the_dead(tmp_path):
    """The engine dies during a long update: nobody calls it, and the job ends all the same."""
    job = launch(tmp_path, "unseen", *SMALL, environment={"MEGATRON_RL_FAULT": "trainer-0:update:2:sleep"})
    job.until(lambda: (progress := read_progress(job.attempt.folder)) is not None
              and (progress.step, progress.newest.name) == (2, "train"), "the update of step 2")
    os.kill(job.component("rollout-0").needs[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    assert job.end() == ExitCode.CRASH, job.text()
    assert time.monotonic() - killed < patient(30)
    assert job.outcome().component == "rollout-0" and "lost its process" in job.text()


def test_a_rank_that_never_arrives_is_named(tmp_path):
    job = launch(tmp_path, "hang", *SMALL, f"run.hang_min_s={patient(5)}", f"run.deadline_s={patient(60)}",
                 environment={"MEGATRON_RL_FAULT": "trainer-1:update:3:sleep"})
    assert job.end() == ExitCode.HANG, job.text()
    outcome = job.outcome()
    assert outcome.component == "trainer-1" and outcome.step == 2
    assert "never arrived: trainer-1" in job.text() and "faults.py" in job.text()
    assert "_communicate" in stack_file(job.attempt, "trainer-0").read_text()


def test_an_error_in_a_rank_is_shown_with_rank_and_log(tmp_path):
    job = launch(tmp_path, "raises", *SMALL, environment={"MEGATRON_RL_FAULT": "trainer-0:update:2:raise"})
    assert job.end() == ExitCode.CRASH
    assert job.outcome().component == "trainer-0"
    assert "trainer-0 failed first: RuntimeError: fault requested" in job.text()
    assert str(job.attempt.logs / "trainer-0.log") in job.text()


def test_a_reward_that_raises_is_the_users_error(tmp_path):
    job = launch(tmp_path, "reward", *SMALL, "reward.functions.0.function=tests.job.graders:raises",
                 "reward.functions.0.args={}")
    assert job.end() == ExitCode.USER_ERROR
    assert "tests.job.graders:raises" in job.text() and "Traceback" not in job.text()
    assert list((job.attempt.folder / "failed_samples").glob("*.json"))
