"""What a job does when something breaks: it ends soon, names the culprit and its log, and leaves nothing running.

Elsewhere: an actor dies on another node (tests/runtime/test_raylets.py), a rank raises (tests/slurm/test_ends.py, and
test_bad_input.py for a full disk)."""

from __future__ import annotations

import os
import signal
import time

from launch.exit_codes import ExitCode
from launch.run.progress import read_progress
from launch.runtime.hang import stack_file
from tests.job.runner import launch
from tests.patience import patient

ALONE = ("run.steps=1000", "trainer.tp=1", "trainer.pp=1")
"""One rank starts fastest."""


def test_a_death_is_noticed_while_nobody_needs_the_dead(tmp_path):
    """The engine dies during a long update: nobody calls it, and the job ends all the same. (Engines that
    die while they are needed: test_engines_die.py.)"""
    job = launch(tmp_path, "unseen", *ALONE, environment={"MEGATRON_RL_FAULT": "trainer-0:update:2:sleep"})
    job.until(lambda: (progress := read_progress(job.attempt.folder)) is not None
              and (progress.step, progress.newest.name) == (2, "train"), "the update of step 2")
    os.kill(job.component("rollout-0").needs[0].pid, signal.SIGKILL)
    killed = time.monotonic()
    assert job.end() == ExitCode.CRASH, job.text()
    assert time.monotonic() - killed < patient(30)
    assert job.outcome().component == "rollout-0" and "lost its process" in job.text()
    assert job.component("rollout-0").log in job.text()
    assert "Traceback" not in job.text().split("rollout-0")[0]


def test_a_rank_that_never_arrives_is_named(tmp_path):
    job = launch(tmp_path, "hang", *ALONE, "trainer.pp=2", f"run.hang_min_s={patient(5)}",
                 f"run.deadline_s={patient(60)}", environment={"MEGATRON_RL_FAULT": "trainer-1:update:3:sleep"})
    assert job.end() == ExitCode.HANG, job.text()
    outcome = job.outcome()
    assert outcome.component == "trainer-1" and outcome.step == 2
    assert "never arrived: trainer-1" in job.text() and "faults.py" in job.text()
    assert "_communicate" in stack_file(job.attempt, "trainer-0").read_text()


def test_a_reward_that_raises_is_the_users_error(tmp_path):
    job = launch(tmp_path, "reward", *ALONE, "reward.functions.0.function=tests.job.graders:raises",
                 "reward.functions.0.args={}")
    assert job.end() == ExitCode.USER_ERROR
    assert "tests.job.graders:raises" in job.text() and "Traceback" not in job.text()
    assert list((job.attempt.folder / "failed_samples").glob("*.json"))
