"""Signals to a job's leader from its first statement on. Slurm may send one while Python still imports, which takes
seconds on a cold shared file system; by default USR1 ends the process, and with it the job. Imports next to nothing."""

from __future__ import annotations

import signal
from types import FrameType

CAUGHT = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
_noted: list[int] = []


def catch() -> None:
    """Note the signals until somebody takes over (`launch.runtime.stop_clock.Signals`)."""
    for number in CAUGHT:
        signal.signal(number, _note)


def take() -> list[int]:
    """What has come so far. Call it when the handlers have been replaced."""
    noted = list(_noted)
    _noted.clear()
    return noted


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
