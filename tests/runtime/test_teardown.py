"""What processes that are ended by KILL leave in /dev/shm, and what of it is removed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import envvars, processes
from launch.config.schema import Run
from launch.files.waiting import wait_until
from launch.run.attempts import RunFolder
from launch.runtime.teardown import end_all, remove_leftovers
from launch.shared_memory import SHM
from tests.patience import patient

MAKER = """
import os, sys, threading
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from launch.run.attempts import Attempt
from launch.run.components import register, register_children
mine, shared = (SharedMemory(create=True, size=4096) for _ in range(2))
for each in (mine, shared):
    resource_tracker.unregister(each._name, "shared_memory")    # KILL takes Python's own cleaner too, mostly in time
unknown = os.open("/dev/shm/mrl-test-" + mine.name, os.O_CREAT | os.O_RDWR, 0o600)
if sys.argv[2] == "registered":
    attempt = Attempt(Path(sys.argv[1]))
    register_children(attempt, register(attempt, "rollout-0", "n1"))
print(os.getpid(), mine.name, shared.name, "mrl-test-" + mine.name, flush=True)
threading.Event().wait()
"""
USER = """
import sys, threading
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(sys.argv[1])
print("has it", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def started(tmp_path):
    """`started(code, *words, **variables)`: a process, and what it prints first."""
    children: list[processes.Child] = []

    def start(code: str, *words: str, **variables: str) -> str:
        log = tmp_path / f"{len(children)}.log"
        children.append(processes.start(
            "child", [sys.executable, "-c", code, *words], log=log,
            environment={**envvars.inherited(), "PYTHONPATH": str(Path(__file__).parents[2]), **variables}))
        wait_until(lambda: log.read_text().endswith("\n"), "the child", patient(20.0), say=print)
        return log.read_text().strip()

    yield start
    for child in children:
        child.end(grace_s=0.0)


@pytest.fixture
def run(tmp_path) -> Iterator[RunFolder]:
    with RunFolder(Run(name="r", dir=str(tmp_path), steps=1)) as run:
        yield run


@pytest.mark.parametrize("who", ["those that still live", "those that are dead", "those of an earlier attempt"])
def test_what_an_attempts_processes_leave_is_removed_and_nothing_that_is_in_use_or_unknown(run, started, who):
    """Of three segments the second is another process's as well, and the third has a name that is not known."""
    attempt = run.new_attempt()
    words = MAKER, str(attempt.folder), "" if who == "those that still live" else "registered"
    pid, *names = started(*words, **{envvars.JOB_MARK: attempt.mark, envvars.NODE: "n1"}).split()
    mine, shared, unknown = (Path(SHM, name) for name in names)
    try:
        assert started(USER, shared.name) == "has it"
        if who != "those that still live":
            os.kill(int(pid), signal.SIGKILL)       # as Ray ends an actor, before the supervisor's turn
            wait_until(lambda: processes.marked(attempt.mark) == [], "its end", patient(20.0), say=print)
        if who == "those of an earlier attempt":
            following = run.new_attempt()
            assert remove_leftovers(attempt, "n1") == remove_leftovers(following, "n2") == [] and mine.exists()
            assert remove_leftovers(following, "n1") == [str(mine)]
        else:
            assert end_all(attempt, "n1") == [str(mine)]
        assert processes.marked(attempt.mark) == [] and not mine.exists() and shared.exists() and unknown.exists()
    finally:
        for path in (mine, shared, unknown):
            path.unlink(missing_ok=True)
