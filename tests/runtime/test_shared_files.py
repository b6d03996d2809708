"""Files of a shared file system: errors that pass, names that appear late, and how often anybody asks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launch.config.schema import Run
from launch.errors import UserError
from launch.files import shared as shared_files
from launch.files.shared import names_in, patiently, read_shared, seen, write_atomically
from launch.files.waiting import wait_until
from launch.health import canary
from launch.health.check import read_report, write_report
from launch.health.network import Result, Task
from launch.plan.plan import Placement
from launch.run import components, node_files
from launch.run.attempts import Attempt, RunFolder
from launch.run.components import ComponentRecord, Pid
from launch.run.node_files import NodeFiles
from launch.run.outcome import Outcome, read_outcome, write_outcome
from launch.run.progress import write_progress
from launch.runtime.supervisor import Supervisor
from launch.runtime.watch import Watch
from tests.progress import doing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(shared_files, "PAUSE_S", 0.01)


def failing(times: int, number: int, monkeypatch, module=os, name="replace"):
    """The next `times` calls of a function of the system fail."""
    real, left = getattr(module, name), [times]

    def call(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


def test_an_error_that_passes_is_waited_out_and_another_is_raised(tmp_path, monkeypatch):
    failing(2, errno.ESTALE, monkeypatch)
    write_outcome(tmp_path, Outcome(status="finished", step=3))
    failing(2, errno.EIO, monkeypatch, Path, "read_text")
    assert read_outcome(tmp_path).step == 3
    failing(1, errno.ENOSPC, monkeypatch)
    with pytest.raises(OSError, match="No space"):
        write_outcome(tmp_path, Outcome(status="finished", step=4))


def test_half_a_file_is_read_again_and_one_that_stays_so_is_an_error(tmp_path):
    file, parsed = tmp_path / "outcome.json", []

    def parse(text: str):
        parsed.append(text)
        file.write_text('{"step": 3}')      # its writer goes on meanwhile
        return json.loads(text)

    file.write_text('{"step":')
    assert read_shared(file, parse) == {"step": 3} and len(parsed) == 2
    with pytest.raises(ValueError):
        patiently(lambda: json.loads("{"), for_s=0.1)
    assert read_shared(tmp_path / "none") is None and read_shared(tmp_path / "no" / "folder") is None


class LateFiles:
    """A client of NFS: what it has not found it does not ask for again, until the folder is opened."""

    def __init__(self, monkeypatch) -> None:
        self.absent: set[str] = set()
        real_stat, real_open, real_text = os.stat, os.open, Path.read_text

        def hidden(path) -> bool:
            chain = [str(each) for each in (*reversed(Path(path).parents), path)]
            if any(each in self.absent for each in chain):
                return True
            self.absent.update([each for each in chain if not os.path.lexists(each)][:1])
            return False

        def stat(path, **kwargs):
            if hidden(path):
                raise FileNotFoundError(errno.ENOENT, "not there", str(path))
            return real_stat(path, **kwargs)

        def read_text(path, *args, **kwargs):
            if hidden(path):
                raise FileNotFoundError(errno.ENOENT, "not there", str(path))
            return real_text(path, *args, **kwargs)

        def opened(path, flags, *args, **kwargs):
            if flags & os.O_DIRECTORY:
                if hidden(path):
                    raise FileNotFoundError(errno.ENOENT, "not there", str(path))
                found = real_open(path, flags, *args, **kwargs)
                self.absent = {each for each in self.absent if os.path.dirname(each) != str(path)}
                return found
            return real_open(path, flags, *args, **kwargs)

        monkeypatch.setattr(shared_files.os, "stat", stat)
        monkeypatch.setattr(shared_files.os, "open", opened)
        monkeypatch.setattr(Path, "read_text", read_text)


def test_a_name_that_was_absent_is_asked_for_again(tmp_path, monkeypatch):
    LateFiles(monkeypatch)
    for name in "ab":
        (tmp_path / name).mkdir()
    end, outcome = tmp_path / "a/end", tmp_path / "b/outcome.json"      # one look does not freshen the other's folder
    assert not seen(end) and read_shared(outcome) is None
    end.touch()
    outcome.write_text("{}")
    for path in (end, outcome):
        with pytest.raises(FileNotFoundError):
            os.stat(path)       # as `Path.exists` would
    assert seen(end) and read_shared(outcome) == {}


def test_a_folder_that_was_absent_is_asked_for_again(tmp_path, monkeypatch):
    LateFiles(monkeypatch)
    hello = tmp_path / "nodes/n1/hello.json"
    assert read_shared(hello) is None
    hello.parent.mkdir(parents=True)
    write_atomically(hello, "{}")
    assert read_shared(hello) == {}


@pytest.mark.parametrize("read, write", [
    (lambda at: read_report(at / "nodes/n1"), lambda at: write_report(at / "nodes/n1", "n1", [])),
    (Task.read, lambda at: Task((), "gloo", 1).write(at)), (Result.read, lambda at: Result(1, 1.0).write(at))])
def test_what_the_preflight_waits_for_is_seen_when_it_comes(tmp_path, monkeypatch, read, write):
    LateFiles(monkeypatch)
    (tmp_path / "fabric").mkdir()
    assert read(tmp_path) is None
    write(tmp_path)
    assert read(tmp_path) is not None


def test_the_answer_of_the_canary_is_seen_when_it_comes(tmp_path, monkeypatch):
    late = LateFiles(monkeypatch)
    answers, found = canary.Answers(tmp_path), []
    asking = threading.Thread(target=lambda: found.append(canary.ask(tmp_path, "n1", 5.0)))
    asking.start()
    wait_until(lambda: str(tmp_path / "canary/n1.answer") in late.absent, "the first look", 5.0, say=print)
    failing(2, errno.ESTALE, monkeypatch)       # of the answer's rename
    assert answers.give() == ["n1"]
    asking.join()
    assert found[0] is not None


def test_names_of_a_folder_are_those_of_whole_files(tmp_path):
    write_atomically(tmp_path / "b.json", "{}")
    for name in ("a.json", ".c.json.77", "d.txt"):
        (tmp_path / name).touch()
    assert names_in(tmp_path, ".json") == ["a.json", "b.json"]
    assert names_in(tmp_path / "none") == names_in(tmp_path / "d.txt") == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_from_a_lock_that_is_held(tmp_path, monkeypatch, number):
    def refused(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(UserError, match=f"does not support locks: {os.strerror(number)}"):
        RunFolder(Run(name="r", dir=str(tmp_path), steps=1), wait_s=60).__enter__()


# ---- how often anybody asks ------------------------------------------------------------------------------------------

_asked: list[str] | None = None


def _hook(event: str, args: tuple) -> None:
    if _asked is not None and event in ("open", "os.listdir", "os.scandir"):
        _asked.append(str(args[0]))


sys.addaudithook(_hook)     # for good: there is no way to take one away


@contextmanager
def counted(folder: Path):
    """Files and folders below `folder` that are opened inside."""
    global _asked
    _asked, found = [], []
    try:
        yield found
    finally:
        found += [path for path in _asked if path.startswith(str(folder))]
        _asked = None


def a_job(tmp_path: Path, nodes: int, ranks: int = 8) -> Attempt:
    with RunFolder(Run(name=f"r{nodes}", dir=str(tmp_path), steps=1)) as folder:
        attempt = folder.new_attempt()
    (attempt.folder / node_files.LEADER_BEAT).touch()
    for node in range(nodes):
        files = NodeFiles(attempt, f"n{node}")
        files.folder.mkdir(parents=True)
        files.beat.touch()
        for rank in range(ranks):
            name = f"trainer-{node * ranks + rank}"
            components._write(attempt, ComponentRecord(name, Pid.of(psutil.Process()), f"n{node}", "log"))
    write_progress(attempt.folder, doing(3, "train", "", 1.0))
    return attempt


def test_what_a_supervisor_reads_does_not_depend_on_the_number_of_nodes(tmp_path):
    """32 nodes that each read the files of all 256 ranks five times a second are a denial of service."""
    counts = {}
    for nodes in (2, 32):
        attempt = a_job(tmp_path, nodes)
        supervisor = Supervisor(attempt, "n1")
        assert supervisor._lost() is None
        with counted(attempt.folder) as asked:
            supervisor._check()
            assert supervisor._lost() is None
        counts[nodes] = len(asked)
        assert not [path for path in asked if path.endswith(".json")], "nothing has changed"
    assert counts[2] == counts[32] <= 6, counts


def test_what_the_leader_reads_between_two_beats_does_not_depend_on_the_number_of_nodes(tmp_path):
    counts = {}
    for nodes in (2, 32):
        attempt = a_job(tmp_path, nodes)
        watch = Watch(attempt, None, Placement.model_construct(nodes=tuple(f"n{node}" for node in range(nodes))), None,
                      None, lambda: None, print)
        with counted(attempt.folder) as asked:
            watch._look_at_nodes()
        assert nodes <= len(asked) <= 3 * nodes + 5
        with counted(attempt.folder) as asked:
            watch._look_at_nodes()
        counts[nodes] = len(asked)
    assert counts == {2: 0, 32: 0}
