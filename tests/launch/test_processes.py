"""Real processes: started, ended with everything they left behind, found by their mark, gone with their parent."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import uuid
from pathlib import Path

import psutil
import pytest

from launch import envvars, processes
from launch.errors import UserError
from tests.patience import patient

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def until(condition, what: str, timeout_s: float = 20.0):
    """Wait for a condition in small steps; fail naming it."""
    import time

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        result = condition()
        if result:
            return result
        time.sleep(0.02)
    pytest.fail(f"waited {timeout_s} s for {what}")


def lines(file: Path, count: int) -> list[str]:
    return until(lambda: len(words := file.read_text().split()) >= count and words, f"{count} words in {file}")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_output_and_exit_status(tmp_path):
    log = tmp_path / "deep" / "child.log"
    code = "import sys; print('out'); sys.stderr.write('err'); sys.exit(7)"
    child = processes.start("child", python(code), log=log, environment=envvars.inherited())
    assert child.wait(patient(20)) == 7 and child.returncode == 7
    assert sorted(log.read_text().split()) == ["err", "out"]


def test_the_child_leads_its_own_session_and_sees_only_the_given_environment(tmp_path):
    log = tmp_path / "log"
    code = "import os; print(os.getsid(0) == os.getpid(), sorted(os.environ))"
    child = processes.start("child", python(code), log=log, environment={"ONLY": "this"})
    assert child.wait(patient(20)) == 0
    assert log.read_text().startswith("True") and "'ONLY'" in log.read_text() and "HOME" not in log.read_text()


def test_wait_has_a_deadline_and_end_uses_term_first(tmp_path):
    code = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(3)))
        print("ready", flush=True)
        time.sleep(60)
    """
    child = processes.start("child", python(code), log=tmp_path / "log", environment=envvars.inherited())
    lines(tmp_path / "log", 1)
    assert child.wait(0.05) is None
    assert child.end(grace_s=10) == [] and child.returncode == 3
    assert (tmp_path / "log").read_text().split() == ["ready", "saved"]


def test_end_kills_what_ignores_term_and_what_lost_its_parent(tmp_path):
    """A grandchild that ignores TERM, and one whose parent has ended: both in the session, both gone afterwards."""
    code = """
        import os, signal, subprocess, sys, time
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); " \\
            "time.sleep(60)"
        middle = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); " \\
            "print(child.pid, flush=True)"
        child = subprocess.Popen([sys.executable, "-c", stubborn])
        subprocess.run([sys.executable, "-c", middle, stubborn])
        print(child.pid, flush=True)
        time.sleep(60)
    """
    child = processes.start("child", python(code), log=tmp_path / "log", environment=envvars.inherited())
    words = lines(tmp_path / "log", 4)
    pids = [int(word) for word in words if word != "up"]
    assert len(pids) == 2 and not any(gone(pid) for pid in pids)
    killed = child.end(grace_s=0.3)
    assert set(killed) == set(pids)
    assert all(gone(pid) for pid in [child.pid, *pids])


def test_ending_what_has_ended_is_no_error(tmp_path):
    child = processes.start("child", python("pass"), log=tmp_path / "log", environment=envvars.inherited())
    child.wait(patient(20))
    assert child.end() == []
    child.signal(signal.SIGTERM)


@pytest.mark.parametrize("blocked", [(), (signal.SIGTERM,)], ids=["", "TERM blocked"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent(tmp_path, death, blocked):
    """It also ends if it inherits a mask that blocks the signal of the kernel."""
    parent = f"""
        import signal, sys, time
        from pathlib import Path
        from launch import envvars, processes
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {{{", ".join(str(int(each)) for each in blocked)}}})
        child = processes.start("grandchild", [sys.executable, "-c", "import time; time.sleep(60)"],
                                log=Path({str(tmp_path / 'inner')!r}), environment=envvars.inherited())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        print(child.pid, flush=True)
        time.sleep(60)
    """
    outer = processes.start("parent", python(parent), log=tmp_path / "outer", cwd=ROOT,
                            environment=envvars.inherited())
    grandchild = int(lines(tmp_path / "outer", 1)[0])
    assert not gone(grandchild)
    os.kill(outer.pid, death)
    outer.wait(patient(20))
    until(lambda: gone(grandchild), "the grandchild to end")


def test_marked_finds_a_daemon_that_left_tree_and_session(tmp_path):
    job = f"test-{uuid.uuid4().hex}"
    code = """
        import subprocess, sys
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        print(subprocess.Popen(sleeper, start_new_session=True).pid, flush=True)
    """
    child = processes.start("child", python(code), log=tmp_path / "log",
                            environment=envvars.inherited() | {envvars.JOB_MARK: job}, dies_with_parent=None)
    child.wait(patient(20))
    daemon = int(lines(tmp_path / "log", 1)[0])
    assert child.end() == [] and not gone(daemon)  # out of reach of the tree and the session
    found = until(lambda: processes.marked(job), "the daemon to show its mark")
    assert [process.pid for process in found] == [daemon]
    assert f"pid {daemon}" in processes.describe(found[0])
    assert processes.end_processes(found, grace_s=5) == [] and gone(daemon)
    assert processes.marked(job) == []


def test_ending_a_child_by_its_mark_leaves_its_exit_status_to_its_owner(tmp_path):
    job = f"test-{uuid.uuid4().hex}"
    child = processes.start("child", python("import time; print('up', flush=True); time.sleep(60)"),
                            log=tmp_path / "log", environment=envvars.inherited() | {envvars.JOB_MARK: job})
    lines(tmp_path / "log", 1)
    assert processes.still_running(processes.marked(job), timeout_s=0.05) == [psutil.Process(child.pid)]
    processes.end_processes(processes.marked(job), grace_s=10)
    assert child.returncode == -signal.SIGTERM and processes.marked(job) == []


def test_a_program_that_does_not_exist(tmp_path):
    for call in (lambda: processes.start("engine", ["no-such-program"], log=tmp_path / "log", environment={}),
                 lambda: processes.output_of(["no-such-program"], timeout_s=5),
                 lambda: processes.run(["no-such-program"])):
        with pytest.raises(UserError, match="no-such-program"):
            call()


def test_short_commands():
    done = processes.output_of(python("import sys; print('a'); sys.exit(4)"), timeout_s=20)
    assert (done.returncode, done.stdout) == (4, "a\n")
    with pytest.raises(UserError, match="no answer within 0.2 s"):
        processes.output_of(python("import time; time.sleep(30)"), timeout_s=0.2)
    assert processes.run(python("raise SystemExit(5)")).returncode == 5
