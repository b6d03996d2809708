"""The stop request: a file named `stop` in the attempt's folder. The job checks for it at each step boundary.
`stop-reason.json` records the reason, which decides what follows.

These write it: `megatron-rl stop` (`launch.runtime.stop_run`); the leader, on a signal or near the end of the time
limit (`launch.runtime.stop_clock`; the margin is in `launch.slurm.margin`); the supervisor of a node, on a signal to
the step; the launcher on this machine, on Ctrl-C (`launch.runtime.local`); and a point of a sweep on one node.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Literal, get_args

from launch.files.shared import read_shared, seen

STOP_FILE = "stop"
REASON_FILE = "stop-reason.json"
Reason = Literal["time-limit", "preemption", "signal", "user"]
"""With `user` the run stays stopped. With the others the job continues later."""


def stop_requested(attempt: Path) -> bool:
    """Whether a stop of this attempt was requested."""
    return seen(attempt / STOP_FILE)


def ask_to_stop(attempt: Path, reason: Reason, detail: str = "") -> bool:
    """Write both files, the reason first. Returns whether this was the first request, whose reason counts."""
    try:
        with (attempt / REASON_FILE).open("x", encoding="utf-8") as file:
            json.dump({"reason": reason, "detail": detail, "at": time.time()}, file)
            file.flush()
            os.fsync(file.fileno())
        first = True
    except FileExistsError:
        first = False
    (attempt / STOP_FILE).touch()
    return first


def stopping_for_s(attempt: Path) -> float:
    """Seconds since the first request; 0 if there was none."""
    try:
        return time.time() - json.loads((attempt / REASON_FILE).read_text(encoding="utf-8"))["at"]
    except (FileNotFoundError, ValueError, KeyError):
        return 0.0


def stop_reason(attempt: Path) -> Reason | None:
    """Why a stop was requested: None if it was not, `user` if no reason was recorded."""
    if not stop_requested(attempt):
        return None
    try:
        reason = (read_shared(attempt / REASON_FILE) or {}).get("reason")
    except ValueError:
        return "user"
    return reason if reason in get_args(Reason) else "user"
