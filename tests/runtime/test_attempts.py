"""The run directory, the outcome, and who is to blame for a failure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.config.schema import Run
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.runtime.attempts import RunFolder, fresh_name
from launch.runtime.components import first_failure, record_error, register
from launch.runtime.outcome import EXIT_CODES, Outcome, read_outcome, write_outcome
from launch.runtime.progress_file import Progress, allowed_s, overdue


def run(tmp_path, **values) -> Run:
    return Run(name="r", dir=str(tmp_path), steps=1, **values)


def test_attempts_are_numbered_and_latest_follows(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        first, second = folder.new_attempt(), folder.new_attempt()
    assert (first.number, second.number) == (1, 2)
    assert (tmp_path / "r" / "latest").resolve() == second.folder.resolve()
    assert first.run_folder == tmp_path / "r"


def test_two_jobs_cannot_work_in_one_run(tmp_path):
    with RunFolder(run(tmp_path)):
        with pytest.raises(UserError, match="another job is working"):
            RunFolder(run(tmp_path)).__enter__()
    with RunFolder(run(tmp_path)):
        pass  # free again


def test_a_fresh_name_is_the_first_free_one(tmp_path):
    assert fresh_name(run(tmp_path)) == "r"
    for name in ("r", "r-2"):
        (tmp_path / name).mkdir()
    assert fresh_name(run(tmp_path)) == "r-3"


def test_every_outcome_has_an_exit_code(tmp_path):
    assert read_outcome(tmp_path) is None
    for status, code in EXIT_CODES.items():
        outcome = Outcome(status=status, step=3)
        write_outcome(tmp_path, outcome)
        assert read_outcome(tmp_path) == outcome and outcome.exit_code == code
    assert EXIT_CODES["finished"] == EXIT_CODES["stopped"] == ExitCode.OK


def test_hang_limit_is_three_times_the_phase_and_at_least_a_minute(tmp_path):
    rule = run(tmp_path)
    def quick(expected):
        return Progress(2, "train", "", at=1000.0, expected_s=expected)

    assert allowed_s(quick(0.5), rule) == 60
    assert allowed_s(quick(100.0), rule) == 300
    assert allowed_s(quick(None), rule) == rule.deadline_s
    assert not overdue(quick(0.5), rule, now=1060.0)
    assert overdue(quick(0.5), rule, now=1060.1)


def test_a_silent_death_explains_the_errors_of_its_peers(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        attempt = folder.new_attempt()
    script = ("import sys; from pathlib import Path; from launch.runtime.attempts import Attempt\n"
              "from launch.runtime.components import register\n"
              "register(Attempt(Path(sys.argv[1])), 'trainer-1', 'n')")
    subprocess.run([sys.executable, "-c", script, str(attempt.folder)], check=True)
    register(attempt, "trainer-0", "n")
    register(attempt, "driver", "n")
    record_error(attempt, "trainer-0", "RuntimeError: Connection closed by peer", "...")
    record_error(attempt, "driver", "ComponentFailed: trainer-0", "...")
    failure = first_failure(attempt)
    assert failure.component == "trainer-1" and "died" in failure.message and not failure.user_error


def test_the_earliest_error_is_told_and_the_users_comes_before_all(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        attempt = folder.new_attempt()
    for name in ("driver", "trainer-0", "trainer-1", "reward-0"):
        register(attempt, name, "n")
    record_error(attempt, "trainer-1", "ValueError: first", "...")
    record_error(attempt, "trainer-0", "RuntimeError: second", "...")
    record_error(attempt, "trainer-1", "ValueError: not counted", "...")
    assert first_failure(attempt).message == "trainer-1 failed first: ValueError: first"
    record_error(attempt, "reward-0", "the column is missing", "...", user_error=True)
    failure = first_failure(attempt)
    assert failure.user_error and failure.message == "the column is missing"
    assert failure.log == os.path.join(attempt.logs, "reward-0.log")
