"""An engine that the driver continues without: its death ends no attempt and explains none, and what is left of it ends
before it is started again."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from launch import envvars, processes
from launch.config.load import load_config
from launch.plan.plan import Placement
from launch.run import components, node_files
from launch.run.attempts import Attempt
from launch.run.components import (
    Failure,
    dead,
    dismiss,
    errors,
    first_failure,
    lost,
    record_error,
    register,
    report_lost,
)
from launch.run.node_files import NodeFiles
from launch.run.outcome import Outcome, write_outcome
from launch.run.progress import write_progress
from launch.runtime import local, teardown, watch
from launch.runtime.local import LocalJob
from launch.runtime.supervisor import Supervisor
from tests.patience import patient
from tests.progress import doing
from tests.slurm_cluster import REPOSITORY

NODE = "local"
REGISTERS = """
import sys
from pathlib import Path
from launch.run.attempts import Attempt
from launch.run.components import record_error, register
attempt, name, error = Attempt(Path(sys.argv[1])), *sys.argv[2:]
print(register(attempt, name, "local").process.pid)
if error:
    record_error(attempt, name, error, "...")
"""


@pytest.fixture
def attempt(tmp_path):
    made = Attempt(tmp_path / "runs" / "r" / "attempts" / "1")
    for name in ("logs", "components", "errors", f"nodes/{NODE}"):
        (made.folder / name).mkdir(parents=True)
    return made


def a_dead(attempt: Attempt, name: str, error: str = "") -> int:
    """A component that ended, with or without an error; returns its pid."""
    told = subprocess.run([sys.executable, "-c", REGISTERS, str(attempt.folder), name, error], cwd=REPOSITORY,
                          check=True, capture_output=True, text=True)
    return int(told.stdout)


def test_another_culprit_is_named_when_the_attempt_really_ends(attempt):
    old = a_dead(attempt, "rollout-0", "EngineDied: engine 0 died")
    assert [error.name for error in errors(attempt)] == ["rollout-0"]
    assert first_failure(attempt, NODE).component == "rollout-0"
    dismiss(attempt, "rollout-0")
    assert dead(attempt, NODE) == [] and errors(attempt) == []
    record_error(attempt, "rollout-0", "EngineDied: another call of it", "...", pid=old)
    assert errors(attempt) == [], "its calls end one after the other"

    register(attempt, "rollout-0", NODE)
    record_error(attempt, "driver", "ComponentFailed: trainer-1", "...")
    a_dead(attempt, "trainer-1")
    assert [record.name for record in dead(attempt, NODE)] == ["trainer-1"]
    assert first_failure(attempt, NODE).component == "trainer-1"


def test_the_error_of_the_process_that_replaced_it_counts(attempt):
    a_dead(attempt, "rollout-0", "EngineDied: first")
    dismiss(attempt, "rollout-0")
    register(attempt, "rollout-0", NODE)
    record_error(attempt, "rollout-0", "EngineDied: second", "...")
    record_error(attempt, "rollout-0", "EngineDied: third", "...")
    assert [error.summary for error in errors(attempt)] == ["EngineDied: second"]


def test_dismissing_what_never_registered_does_nothing(attempt):
    dismiss(attempt, "rollout-0")
    assert errors(attempt) == [] and components.dismissed(attempt) == []


def test_a_supervisors_report_of_a_dismissed_engine_is_withdrawn(attempt):
    (attempt.folder / node_files.LEADER_BEAT).touch()
    supervisor = Supervisor(attempt, NODE)
    first = a_dead(attempt, "rollout-0")
    failure = supervisor._lost()
    assert failure is not None and (failure.component, failure.pid) == ("rollout-0", first)
    report_lost(attempt, NODE, failure)
    assert [each.component for each in lost(attempt)] == ["rollout-0"]
    dismiss(attempt, "rollout-0")
    assert lost(attempt) == [] and supervisor._lost() is None

    second = a_dead(attempt, "rollout-0", "EngineDied: again")
    failure = supervisor._lost()
    assert failure is not None and failure.pid == second != first
    report_lost(attempt, NODE, failure)
    assert [each.pid for each in lost(attempt)] == [second]
    report_lost(attempt, NODE, Failure("trainer-0", "log", "only saw a closed connection"))
    assert [each.component for each in lost(attempt)] == ["rollout-0"], "the first report counts"


def test_what_is_left_of_an_engine_ends_before_it_starts_again(attempt):
    """Its engine core outlives the killed actor. Other components of the node are not touched."""
    def orphan(name: str) -> processes.Child:
        return processes.start(name, [sys.executable, "-c", "import time; time.sleep(60)"],
                               log=attempt.logs / f"{name}.log",
                               environment={envvars.JOB_MARK: attempt.mark, envvars.NODE: NODE,
                                            envvars.COMPONENT: name})

    left, other = orphan("rollout-1"), orphan("rollout-0")
    try:
        teardown.end_earlier(attempt, NODE, "rollout-1")
        assert left.wait(0.2) is None, "nobody was dismissed"
        a_dead(attempt, "rollout-1")
        dismiss(attempt, "rollout-1")
        teardown.end_earlier(attempt, NODE, "rollout-1")
        assert left.wait(5.0) is not None and other.wait(0.0) is None
    finally:
        for child in (left, other):
            child.end(grace_s=0.0)


class _Silent:
    def update(self) -> None: ...


def test_the_leader_waits_for_the_driver_and_goes_on_if_it_does(attempt, monkeypatch):
    """A death is first reported by a supervisor. When the driver continues without that engine, its time is forgotten:
    the next death has the whole patience again."""
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(watch, "DRIVER_GRACE_S", 0.5)
    monkeypatch.setattr(node_files, "BEAT_EVERY_S", 0.05)
    NodeFiles(attempt, NODE).beat.touch()
    done: list[float] = []

    def tick() -> None:
        if not done:
            report_lost(attempt, NODE, Failure("rollout-0", "log", "died", pid=a_dead(attempt, "rollout-0")))
            done.append(time.monotonic())
        elif len(done) == 1 and time.monotonic() - done[0] > 0.25:
            dismiss(attempt, "rollout-0")
            done.append(time.monotonic())
        elif len(done) == 2 and time.monotonic() - done[1] > 0.8:
            write_outcome(attempt.folder, Outcome(status="finished", step=3))

    step = processes.start("srun", [sys.executable, "-c", "import time; time.sleep(60)"],
                           log=attempt.logs / "srun.log", environment={})
    try:
        made = watch.Watch(attempt, load_config("configs/tiny/grpo.yaml").config,
                           Placement.model_construct(nodes=(NODE,)), step, _Silent(), tick, lambda line: None)
        assert made.run().status == "finished"
    finally:
        step.end(grace_s=0.0)


DRIVER = """
import sys, time
from pathlib import Path
from launch.run.attempts import Attempt
from launch.run.components import dismiss
from launch.run.outcome import Outcome, write_outcome
attempt = Attempt(Path(sys.argv[1]))
dismiss(attempt, "rollout-0")
time.sleep(float(sys.argv[2]))
write_outcome(attempt.folder, Outcome(status="finished", step=3))
"""


def test_the_launcher_of_this_machine_goes_on_too(attempt, monkeypatch):
    grace_s = patient(2.0)
    monkeypatch.setattr(local, "DRIVER_GRACE_S", grace_s)
    a_dead(attempt, "rollout-0")
    write_progress(attempt.folder, doing(1, "train", at=time.time()))
    ray = processes.start("ray", [sys.executable, "-c", "import time; time.sleep(60)"],
                          log=attempt.logs / "ray.log", environment={})
    driver = processes.start("driver", [sys.executable, "-c", DRIVER, str(attempt.folder), str(grace_s + 0.5)],
                             log=attempt.logs / "driver.log", environment={}, cwd=REPOSITORY)
    job = LocalJob(attempt, load_config("configs/tiny/grpo.yaml").config, "cpu", None)
    monkeypatch.setattr(job, "_start", lambda: (ray, driver))
    monkeypatch.setattr(local, "View", lambda folder, display: _Silent())
    try:
        assert job._run(None).status == "finished"
    finally:
        for child in (ray, driver):
            child.end(grace_s=0.0)
        job.session.remove()
