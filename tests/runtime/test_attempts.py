"""The run directory, the outcome, and the process that a failure is blamed on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from launch.config.load import load_config
from launch.config.schema import Run
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.run.attempts import RunFolder, fresh_name
from launch.run.components import ComponentRecord, Pid, dead, first_failure, record_error, register
from launch.run.outcome import EXIT_CODES, Outcome, read_outcome, write_outcome
from launch.run.progress import Progress, Span, allowed_s, overdue
from tests.progress import doing


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
        with pytest.raises(UserError, match="another job is using"):
            RunFolder(run(tmp_path)).__enter__()
    with RunFolder(run(tmp_path)):
        pass  # free again


def test_a_folder_that_cannot_be_written_is_the_users_error(tmp_path):
    (tmp_path / "r").write_text("a file")
    with pytest.raises(UserError, match="cannot write the run's folder"):
        RunFolder(run(tmp_path)).__enter__()


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_a_file_system_without_locks_is_not_taken_for_another_job(monkeypatch, tmp_path, wait_s):
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)        # no such file system is at hand
    with pytest.raises(UserError, match="does not support locks: No locks available.*\n.*run.dir\n.*NFS"):
        RunFolder(run(tmp_path), wait_s=wait_s).__enter__()


def test_processes_of_other_nodes_are_never_judged_by_their_pids(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        attempt = folder.new_attempt()
    gone = ComponentRecord("trainer-0", Pid(2**22 - 1, 0.0), "elsewhere", "log")
    (attempt.folder / "components" / "elsewhere").mkdir()
    (attempt.folder / "components" / "elsewhere" / "trainer-0.json").write_text(json.dumps(asdict(gone)))
    assert dead(attempt, "here") == [] and dead(attempt, "elsewhere") == [gone]


LOSES_A_CHILD = """
import subprocess, sys
from pathlib import Path
from launch.run.attempts import Attempt
from launch.run.components import dead, first_failure, register, register_children

attempt = Attempt(Path(sys.argv[1]))
record = register(attempt, "rollout-0", "n")
child = subprocess.Popen(["sleep", "60"])
record = register_children(attempt, record)
assert [each.pid for each in record.needs] == [child.pid] and dead(attempt, "n") == []
child.kill()
child.wait()
assert [each.name for each in dead(attempt, "n")] == ["rollout-0"]
assert f"lost its process {child.pid}" in first_failure(attempt, "n").message
"""


def test_a_component_that_lost_a_process_it_needs_is_dead(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        attempt = folder.new_attempt()
    subprocess.run([sys.executable, "-c", LOSES_A_CHILD, str(attempt.folder)], check=True)  # a process without others


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


def test_hang_limit_is_three_times_the_phase_and_at_least_a_minute():
    config = load_config("configs/tiny/grpo.yaml").config

    def train(expected, phase="train"):
        return Span(phase, "", began=900.0, at=1000.0, expected_s=expected)

    assert allowed_s(train(0.5), config) == 60
    assert allowed_s(train(100.0), config) == 300
    assert allowed_s(train(None), config) > config.run.deadline_s, "the job's own deadline must speak first"
    assert allowed_s(train(0.5, "save"), config) == allowed_s(train(None), config), "the last save is not a copy only"
    assert allowed_s(train(0.5, "sync"), config) > 1.5 * config.weight_sync.timeout_s
    slow, fast = train(100.0, "rollout"), train(0.5)
    both = Progress(2, 1, (slow, fast))
    assert overdue(both, config, now=1060.0) == []
    assert overdue(both, config, now=1060.1) == [fast]
    assert overdue(both, config, now=1300.1) == [slow, fast]
    assert overdue(doing(2, "end", at=1000.0), config, now=1e9) == [], "the end has deadlines of its own"


def test_a_silent_death_explains_the_errors_of_its_peers(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        attempt = folder.new_attempt()
    script = ("import sys; from pathlib import Path; from launch.run.attempts import Attempt\n"
              "from launch.run.components import register\n"
              "register(Attempt(Path(sys.argv[1])), 'trainer-1', 'n')")
    subprocess.run([sys.executable, "-c", script, str(attempt.folder)], check=True)
    register(attempt, "trainer-0", "n")
    register(attempt, "driver", "n")
    record_error(attempt, "trainer-0", "RuntimeError: Connection closed by peer", "...")
    record_error(attempt, "driver", "ComponentFailed: trainer-0", "...")
    failure = first_failure(attempt, "n")
    assert failure.component == "trainer-1" and "died" in failure.message and not failure.user_error


def test_the_earliest_error_is_told_and_the_users_comes_before_all(tmp_path):
    with RunFolder(run(tmp_path)) as folder:
        attempt = folder.new_attempt()
    for name in ("driver", "trainer-0", "trainer-1", "reward-0"):
        register(attempt, name, "n")
    record_error(attempt, "trainer-1", "ValueError: first", "...")
    record_error(attempt, "trainer-0", "RuntimeError: second", "...")
    record_error(attempt, "trainer-1", "ValueError: not counted", "...")
    assert first_failure(attempt, "n").message == "trainer-1 failed first: ValueError: first"
    record_error(attempt, "reward-0", "the column is missing", "...", user_error=True)
    failure = first_failure(attempt, "n")
    assert failure.user_error and failure.message == "the column is missing"
    assert failure.log == os.path.join(attempt.logs, "reward-0.log")
