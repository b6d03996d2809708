"""A controller that does not answer for a while: slurmctld is stopped and goes on later, as one that is overloaded
does. What was sent to it meanwhile, it still does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.errors import UserError
from launch.slurm.client import Slurm
from launch.slurm.refusals import SlurmError, names
from tests.slurm.test_client import without_controller
from tests.slurm_cluster import SlurmCluster

BUSY_S = 5.0
MESSAGE_S = 1
"""After so long a command gives up."""


@pytest.fixture
def hurried(slurm: SlurmCluster, tmp_path) -> Slurm:
    """A client whose commands do not wait long for the controller."""
    conf = tmp_path / "slurm.conf"
    usual = Path(slurm.environment["SLURM_CONF"]).read_text(encoding="utf-8")
    conf.write_text(f"{usual}\nMessageTimeout={MESSAGE_S}\n")
    return Slurm({**slurm.environment, "SLURM_CONF": str(conf)})


@contextmanager
def busy(slurm: SlurmCluster, seconds: float = BUSY_S) -> Iterator[None]:
    controller = slurm.daemons["slurmctld"]
    controller.signal(signal.SIGSTOP)
    timer = threading.Timer(seconds, controller.signal, [signal.SIGCONT])
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.fixture
def script(tmp_path) -> Path:
    file = tmp_path / "wait.sh"
    file.write_text("#!/bin/bash\n#SBATCH --job-name=mine\n#SBATCH --hold\nexec sleep 300\n")
    return file


def test_a_question_is_asked_again_until_the_controller_answers(slurm: SlurmCluster, hurried, script):
    job, said = hurried.submit(script), []
    with busy(slurm):
        assert hurried.patient(said.append, patience_s=60, pause_s=0.5).show_job(job).name == "mine"
    assert said and "trying again in 0.5 s" in said[0] and len(hurried.calls) == len(said) + 2, "all are counted"


def test_who_is_not_patient_is_told_that_nobody_knows(slurm: SlurmCluster, hurried, script):
    with busy(slurm, 3.0), pytest.raises(SlurmError) as error:
        hurried.submit(script)
    assert error.value.answer == "none" and "no answer" in names(error.value)
    assert "may have accepted a submission" in error.value.fix and "nothing was submitted" not in error.value.fix


def test_a_submission_whose_answer_was_lost_is_not_made_twice(slurm: SlurmCluster, hurried, script):
    """The controller takes it when it goes on; by then the command has given up."""
    said: list[str] = []
    with busy(slurm):
        job = hurried.patient(said.append, patience_s=60, pause_s=0.5).submit_once(script, ["a=1", "b c"], name="mine",
                                                                                  cwd=script.parent)
    assert said and len([call for call in hurried.calls if call.startswith("sbatch")]) == 1
    assert [each.job_id for each in hurried.queue(name="mine")] == [job]
    assert hurried.show_job(job).command == f"{script} a=1 b c"


def test_a_controller_that_cannot_be_reached_has_done_nothing(slurm: SlurmCluster, script, tmp_path):
    client = Slurm({**slurm.environment, "SLURM_CONF": str(without_controller(slurm, tmp_path))})
    said: list[str] = []
    with pytest.raises(UserError) as error:
        client.patient(said.append, patience_s=5.0, pause_s=0.4).submit(script)
    assert error.value.answer == "absent" and said, "asked again: that cannot make two jobs"
