"""What the next attempt makes of one that left no word, and how waiting names who is missing."""

from __future__ import annotations

import json
import os
import time

import pytest

from launch.config.schema import Run
from launch.files import waiting
from launch.run.attempt_log import FILE, append, close_open_attempts, read_history, record_of
from launch.run.attempts import Attempt, RunFolder
from launch.run.node_files import LEADER_BEAT, BeatWatch, NodeFiles, vanished
from launch.run.outcome import Outcome, read_outcome, write_outcome
from launch.run.progress import write_progress
from launch.run.stop import ask_to_stop, stop_reason
from launch.slurm.same_job import output_of_next
from tests.progress import doing


@pytest.fixture
def folder(tmp_path):
    with RunFolder(Run(name="r", dir=str(tmp_path), steps=1)) as folder:
        yield folder


def beats(attempt: Attempt, leader: float, **nodes: float) -> None:
    """Last beats, in seconds before now."""
    now = time.time()
    for name, ago in nodes.items():
        files = NodeFiles(attempt, name)
        files.folder.mkdir(parents=True)
        files.beat.touch()
        os.utime(files.beat, (now - ago, now - ago))
    path = attempt.folder / LEADER_BEAT
    path.touch()
    os.utime(path, (now - leader, now - leader))


def died(folder: RunFolder, job: str = "7") -> Attempt:
    attempt = folder.new_attempt()
    (attempt.folder / "job.json").write_text(json.dumps({"job_id": job}))
    return attempt


def test_an_attempt_without_a_word_died_and_the_node_that_fell_silent_first_is_named(folder):
    attempt = died(folder)
    write_progress(attempt.folder, doing(13, "train"))
    beats(attempt, leader=31, n1=30, n2=58, n3=31)
    whole, added = close_open_attempts(folder.folder)
    assert whole == added and [(past.status, past.nodes, past.step, past.job_id) for past in added] == [
        ("died", ("n2",), 12, "7")]
    assert read_outcome(attempt.folder).status == "died"
    assert close_open_attempts(folder.folder) == (whole, []), "told once"


def test_no_node_is_blamed_when_all_went_together(folder):
    attempt = died(folder)
    beats(attempt, leader=30, n1=31, n2=29)
    assert vanished(attempt) == []
    (past,), _ = close_open_attempts(folder.folder)
    assert past.nodes == () and "no node fell silent before the others" in past.message


def test_the_leaders_own_node_is_seen_against_the_others(folder):
    attempt = died(folder)
    beats(attempt, leader=58, n1=58, n2=30)
    assert vanished(attempt) == ["n1"]


def test_a_leader_that_died_between_its_outcome_and_its_decision(folder):
    attempt = died(folder)
    write_outcome(attempt.folder, Outcome(status="crash", step=4, nodes=("n1",)))
    (past,), _ = close_open_attempts(folder.folder)
    assert (past.status, past.step, past.decision) == ("crash", 4, None)


def test_a_torn_last_line_is_an_attempt_without_a_line(folder):
    for number in (1, 2):
        append(folder.folder, record_of(died(folder), "7", Outcome(status="crash", step=3 * number),
                                        read_history(folder.folder)))
    path = folder.folder / FILE
    path.write_text(path.read_text()[:-40])
    assert [past.attempt for past in read_history(folder.folder)] == [1]
    whole, added = close_open_attempts(folder.folder)
    assert [past.attempt for past in added] == [2] and [past.step_before for past in whole] == [0, 3]


def test_a_beat_counts_when_it_is_seen_to_move_whatever_its_clock_says(tmp_path):
    beat = tmp_path / "beat"
    beat.touch()
    os.utime(beat, (0, 0))
    watch = BeatWatch({"n1": beat, "n2": tmp_path / "none"})
    watch.look()
    asked = watch.watched_s
    watch.look()
    assert watch.not_since(asked) == ["n1", "n2"]
    os.utime(beat, (5, 5))
    watch.look()
    assert watch.not_since(asked) == ["n2"] and watch.silent(1000) == [] and watch.silent(-1) == ["n1", "n2"]


def test_waiting_names_who_is_missing(monkeypatch):
    monkeypatch.setattr(waiting, "SAY_EVERY_S", 0.0)
    said: list[str] = []
    left = waiting.wait_for(lambda: [f"n{number}" for number in range(10)], "to greet", 0.3, say=said.append)
    assert len(left) == 10 and said[0].startswith("waiting for n0, n1, n2, n3, n4, n5, n6, n7 and 2 more to greet")


def test_the_first_reason_to_stop_holds_and_a_bare_stop_file_is_the_users(folder):
    first, second = folder.new_attempt(), folder.new_attempt()
    assert stop_reason(first.folder) is None
    assert ask_to_stop(first.folder, "time-limit") and not ask_to_stop(first.folder, "user")
    assert stop_reason(first.folder) == "time-limit"
    (second.folder / "stop").touch()
    assert stop_reason(second.folder) == "user"


@pytest.mark.parametrize(("log", "pattern"), [("/data7/runs/grpo-7.log", "/data7/runs/grpo-%j.log"),
                                              ("/runs/7/grpo-70-7.log", "/runs/7/grpo-70-%j.log"),
                                              ("/runs/50%/7.log", "/runs/50%%/%j.log"),
                                              ("/runs/fixed.log", None)])
def test_a_fresh_job_writes_beside_the_old_one(log, pattern):
    assert output_of_next(log, "7") == pattern
