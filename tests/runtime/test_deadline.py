"""When a job must begin to end, and what a signal means."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from launch.run.attempts import Attempt
from launch.run.node_files import TERMINATED
from launch.run.stop import ask_to_stop, stop_reason, stop_requested
from launch.runtime import stop_clock
from launch.runtime.stop_clock import JobIsOver, Signals, StopClock
from launch.slurm.job_facts import combine
from launch.slurm.records import ahead_s, job_records
from tests.runtime.slurm_text import JOB


class AskedSlurm:
    """The one question that the clock asks."""

    def __init__(self, ends: float | None) -> None:
        self.ends, self.asked, self.changes = ends, 0, ("", "")

    def show_job(self, job_id: str):
        self.asked += 1
        return job_records(JOB.format(end=int(self.ends)).replace(*self.changes))[0]


@pytest.fixture
def clock(tmp_path):
    """A function that makes a stop clock whose job ends in so many seconds."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM,
                                                               signal.SIGINT)}

    def make(left_s: float, margin: float = 600.0, now_left_s: float | None = None) -> StopClock:
        folder = tmp_path / "attempts" / "1"
        folder.mkdir(parents=True)
        end = time.time() + left_s
        facts = combine(job_records(JOB.format(end=int(end)))[0])
        slurm = AskedSlurm(end if now_left_s is None else time.time() + now_left_s)
        made = StopClock(Attempt(folder), facts, slurm, Signals(), lambda line: None)
        made.margin_s = margin
        return made

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_leader_keeps_its_own_deadline(clock):
    far = clock(left_s=1000)
    far.tick()
    assert not stop_requested(far.attempt.folder) and far.slurm.asked == 0
    far.end_time = time.time() + 599
    far.slurm.ends = far.end_time
    far.tick()
    assert stop_reason(far.attempt.folder) == "time-limit"


def test_a_time_limit_that_was_raised_meanwhile_is_respected_and_asked_for_once(clock):
    raised = clock(left_s=500, now_left_s=5000)
    for _ in range(3):
        raised.tick()
    assert not stop_requested(raised.attempt.folder) and raised.slurm.asked == 1


@pytest.mark.parametrize(("left_s", "reason"), [(650, "time-limit"), (5000, "signal")])
def test_usr1_is_the_time_limit_only_near_it(clock, left_s, reason):
    """Slurm may send its signal a minute early; anywhere else it is somebody's wish, or a preemption's warning."""
    stops = clock(left_s)
    os.kill(os.getpid(), signal.SIGUSR1)
    stops.tick()
    assert stop_reason(stops.attempt.folder) == reason


def test_term_is_slurm_ending_the_job_and_the_first_reason_holds(clock):
    stops = clock(5000)
    os.kill(os.getpid(), signal.SIGUSR1)
    stops.tick()
    os.kill(os.getpid(), signal.SIGTERM)
    stops.tick()
    assert stop_reason(stops.attempt.folder) == "signal"


def test_usr1_of_a_preemption_is_one_and_the_grace_is_what_is_left(clock):
    stops = clock(left_s=5000, now_left_s=60)
    stops.slurm.changes = ("RunTime=", "PreemptTime=1790000000 RunTime=")
    os.kill(os.getpid(), signal.SIGUSR1)
    stops.tick()
    assert stop_reason(stops.attempt.folder) == "preemption" and stops.end_time < time.time() + 61


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT"])
def test_term_of_a_job_that_is_over_ends_it_and_of_one_that_runs_is_a_grace_time(clock, monkeypatch, state):
    """The supervisors say that the step got TERM; the leader asks Slurm, once, what it means. A second TERM comes when
    the grace is over. Why the job was asked to stop does not matter."""
    monkeypatch.setattr(stop_clock, "ASK_EVERY_S", 0.0)
    stops = clock(5000)
    ask_to_stop(stops.attempt.folder, "time-limit")
    file = stops.attempt.folder / TERMINATED
    file.touch()
    os.utime(file, (1000, 1000))
    stops.tick()
    stops.tick()
    assert stops.slurm.asked == 1
    stops.slurm.changes = ("JobState=RUNNING", f"JobState={state}")
    stops.tick()
    file.touch()
    with pytest.raises(JobIsOver, match=state):
        stops.tick()


def test_term_to_the_leader_alone_is_asked_about_too(clock):
    stops = clock(5000)
    stops.slurm.changes = ("JobState=RUNNING", "JobState=COMPLETING")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(JobIsOver):
        stops.tick()


@pytest.mark.parametrize(("started", "run_time", "asked", "answered", "ahead"), [
    (1000.0, "00:01:40", 1100.2, 1100.4, 0.0),          # clocks agree
    (1000.0, "1-00:00:00", 87400.0, 87403.9, 0.0),      # a slow answer is no skew
    (1000.0, "00:01:40", 1080.0, 1081.0, 19.0),         # the controller is ahead: its limit comes early
    (1000.0, "00:01:40", 1180.0, 1230.0, -79.0),        # it is behind: by no more than is certain
    (None, "00:01:40", 1080.0, 1081.0, 0.0), (1000.0, "INVALID", 1080.0, 1081.0, 0.0)])
def test_the_controllers_clock_is_told_from_start_and_run_time(started, run_time, asked, answered, ahead):
    record = job_records(JOB.format(end=5000).replace("00:00:05", run_time))[0]
    assert ahead_s(dataclasses.replace(record, started=started), asked, answered) == ahead


def test_a_time_limit_is_kept_by_the_controllers_clock():
    record = job_records(JOB.format(end=5000))[0]
    assert combine(record).end_time == 5000 and combine(record, ahead_s=19.0).end_time == 5000 - 19


def test_steps_that_take_longer_than_planned_make_the_stop_come_earlier(clock, monkeypatch):
    monkeypatch.setattr(stop_clock, "MEASURE_EVERY_S", 0.0)
    slow = clock(left_s=1050, margin=100)
    slow.tick()
    assert not stop_requested(slow.attempt.folder)
    (slow.attempt.folder / "metrics.jsonl").write_text(
        '{"step": 1, "time/step": 700.0, "time/checkpoint": 1.0, "time/checkpoint_write": 200.0}\n', encoding="utf-8")
    slow.tick()
    assert stop_requested(slow.attempt.folder)


def test_steps_that_are_faster_than_planned_do_not_shorten_the_margin(clock, monkeypatch):
    monkeypatch.setattr(stop_clock, "MEASURE_EVERY_S", 0.0)
    fast = clock(left_s=599)
    (fast.attempt.folder / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n', encoding="utf-8")
    fast.tick()
    assert stop_reason(fast.attempt.folder) == "time-limit"
