"""Reward functions that misbehave, loaded by path as a user's would be."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

NOT_CALLABLE = 3


def length_of(completion: str, answer: str | None) -> float:
    return float(len(completion))


def by_completion(completion: str, answer: str | None) -> float:
    """Does what the completion says."""
    actions = {
        "hang": hang, "spin": spin, "raise": fail, "exit": leave, "sys.exit": sys.exit, "segfault": segfault,
        "nan": lambda: float("nan"), "inf": lambda: float("inf"), "none": lambda: None, "text": lambda: "1",
        "numpy": lambda: np.float32(0.5), "bool": lambda: True, "child and hang": lambda: child_and_hang(answer),
        "main thread": lambda: float(threading.current_thread() is threading.main_thread()),
        "pid": lambda: float(os.getpid()),
    }
    return actions[completion]() if completion in actions else 1.0


def hang() -> None:
    threading.Event().wait()


def spin() -> None:
    """Catastrophic backtracking: C code that holds the interpreter's lock and hears no signal."""
    re.fullmatch("(a+)+b", "a" * 60)


def fail() -> None:
    raise KeyError("no such unit")


def leave() -> None:
    os._exit(7)


def segfault() -> None:
    ctypes.string_at(0)


def child_and_hang(pid_file: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(pid_file).write_text(str(process.pid))
    hang()


def slow(completion: str, answer: str | None) -> float:
    time.sleep(0.15)
    return 1.0


def all_offered(completion: str, answer: str | None, prompt: str, unit: str, *, finish_reason: str,
                completion_tokens: int, scale: float = 1.0) -> float:
    assert (prompt, unit, finish_reason) == ("how far?", "km", "length"), (prompt, unit, finish_reason)
    return scale * completion_tokens


def any_keywords(completion: str, answer: str | None, **columns: object) -> float:
    return float(len(columns))


def one_parameter(completion: str) -> float:
    return 0.0


async def asynchronous(completion: str, answer: str | None) -> float:
    return 0.0
