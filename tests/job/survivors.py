"""Counts the processes of a job from outside, without the mark by which the project itself finds and ends them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from tests.patience import patient

PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Family:
    """This process's descendants, less those that there were before."""

    before: set[psutil.Process] = field(default_factory=lambda: set(psutil.Process().children(recursive=True)))

    def alive(self) -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True)
                if process not in self.before and _runs(process)]

    def left(self, within_s: float) -> list[str]:
        """What still runs after `within_s`, each with its command line; [] as soon as nothing does."""
        end = time.monotonic() + patient(within_s)
        while self.alive() and time.monotonic() < end:
            time.sleep(0.1)
        return [f"{process.pid}: {' '.join(process.cmdline())[:200]}" for process in self.alive()]

    def reap(self) -> None:
        """Take the exit status of orphans that have ended (not of those that this process started itself: they are
        waited for where they were started, before this is called)."""
        for process in psutil.Process().children():
            if process not in self.before and not _runs(process):
                os.waitpid(process.pid, os.WNOHANG)


@contextmanager
def family() -> Iterator[Family]:
    """Inside, this process inherits orphans (as init does): whatever a job starts, however it detaches itself, stays
    a descendant and is counted."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    started = Family()
    try:
        yield started
    finally:
        for process in started.alive():  # only after a failure: the next test must not find them
            process.kill()
        psutil.wait_procs(started.alive(), timeout=patient(5))
        started.reap()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
