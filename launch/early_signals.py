"""Catches signals to a job's leader from its first statement on. Slurm may send one while Python still imports, which
takes seconds on a cold shared file system; by default USR1 ends the process and the job. Imports next to nothing."""

from __future__ import annotations

import signal
from types import FrameType

CAUGHT = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_noted: list[int] = []


def catch() -> None:
    """Note the signals until `launch.runtime.stop_clock.Signals` takes over."""
    for number in CAUGHT:
        signal.signal(number, _note)


def take() -> list[int]:
    """Signals noted so far. Call it after the handlers have been replaced."""
    noted = list(_noted)
    _noted.clear()
    return noted


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
