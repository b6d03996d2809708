"""What a leader does with errors that nobody foresaw."""

from __future__ import annotations

import errno
import json
import os
import signal
import time

import pytest

from launch.config.load import load_config
from launch.config.schema import Run
from launch.health.ledger import Ledger
from launch.run.attempt_log import read_history
from launch.run.attempts import RunFolder
from launch.run.components import errors
from launch.run.node_files import NodeFiles
from launch.run.outcome import read_outcome
from launch.run.progress import write_progress
from launch.runtime.aftermath import Aftermath
from launch.runtime.leader import Leader
from launch.runtime.stop_clock import JobIsOver, Signals
from launch.slurm.job_facts import combine
from launch.slurm.records import job_records
from tests.progress import doing
from tests.runtime.slurm_text import JOB


class AskedSlurm:
    """Answers for a running job, and notes what it is told to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def show_job(self, job_id: str):
        return job_records(JOB.format(end=2_000_000_000))[0]

    def patient(self, say) -> AskedSlurm:
        return self

    def requeue(self, job_id: str) -> None:
        self.calls.append(f"requeue {job_id}")


@pytest.fixture
def leader(tmp_path):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM,
                                                               signal.SIGINT)}
    with RunFolder(Run(name="r", dir=str(tmp_path), steps=1)) as run:
        yield Leader(AskedSlurm(), combine(job_records(JOB.format(end=2_000_000_000))[0]), Signals(),
                     load_config("configs/tiny/grpo.yaml"), "configs/tiny/grpo.yaml", (), run.new_attempt(),
                     Ledger(run.folder / "ledger.json", cluster_nodes=4), [], [])
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), ValueError("no JSON"), KeyError("n7")])
def test_an_unforeseen_error_is_a_crash_with_everything_that_follows_one(leader, monkeypatch, error):
    def attempt(self):
        write_progress(self.attempt.folder, doing(4, "train"))
        raise error

    monkeypatch.setattr(Leader, "_attempt", attempt)
    assert leader.run() == 0, "requeued"
    outcome = read_outcome(leader.attempt.folder)
    assert (outcome.status, outcome.step, outcome.component) == ("crash", 3, "leader")
    assert type(error).__name__ in outcome.message
    assert json.loads((leader.attempt.folder / "end").read_text()) == {"check": True}
    (past,) = read_history(leader.attempt.run_folder)
    assert (past.status, past.decision) == ("crash", "requeue") and leader.slurm.calls == ["requeue 7"]
    (told,) = errors(leader.attempt)
    assert told.name == "leader" and "in attempt" in told.traceback


def test_an_error_after_the_attempt_does_not_keep_the_job_from_what_follows(leader, monkeypatch):
    def attempt(self):
        raise RuntimeError("first")

    def tear_down(self, outcome):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Leader, "_attempt", attempt)
    monkeypatch.setattr(Leader, "_tear_down", tear_down)
    assert leader.run() == 0 and leader.slurm.calls == ["requeue 7"]
    assert "first" in read_outcome(leader.attempt.folder).message


def test_a_full_disk_stays_the_users_to_mend(leader, monkeypatch):
    def attempt(self):
        raise OSError(errno.ENOSPC, "No space left on device", "/runs/x")

    monkeypatch.setattr(Leader, "_attempt", attempt)
    assert leader.run() == 2 and leader.slurm.calls == []
    assert read_outcome(leader.attempt.folder).status == "user_error"


def over(self):
    raise JobIsOver("Slurm ends this job: COMPLETING, None")


def test_a_job_that_slurm_ends_because_a_node_has_failed_names_it(leader, monkeypatch):
    for node, ago in (("n1", 0), ("n2", 40), ("n3", 0)):
        files = NodeFiles(leader.attempt, node)
        files.folder.mkdir(parents=True)
        files.beat.touch()
        os.utime(files.beat, (time.time() - ago, time.time() - ago))
    monkeypatch.setattr(Leader, "_attempt", over)
    monkeypatch.setattr(Aftermath, "conclude", lambda *arguments: 76)
    leader.run()
    outcome = read_outcome(leader.attempt.folder)
    assert (outcome.status, outcome.nodes) == ("node_failure", ("n2",)) and "COMPLETING" in outcome.message


def test_a_job_that_slurm_ends_is_interrupted(leader, monkeypatch):
    monkeypatch.setattr(Leader, "_attempt", over)
    assert leader.run() == 130
    assert json.loads((leader.attempt.folder / "end").read_text()) == {"check": False}
    assert read_history(leader.attempt.run_folder)[0].decision == "stop"
