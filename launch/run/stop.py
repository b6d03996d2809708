"""The request to stop: a file named `stop` in the attempt's folder, which the job looks for at each step boundary.
`stop-reason.json` says who asked, which decides what follows.

Who asks: `megatron-rl stop` (`launch.runtime.stop_run`), the leader for a signal or the end of the time limit
(`launch.runtime.stop_clock`; how long before it: `launch.slurm.margin`), the supervisor of a node for a signal to the
step, the launcher on this machine for Ctrl-C (`launch.runtime.local`), and a point of a sweep on one node.
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
"""`user`: the run stays stopped. The others: the job goes on later."""


def stop_requested(attempt: Path) -> bool:
    """Whether somebody asked this attempt to stop."""
    return seen(attempt / STOP_FILE)


def ask_to_stop(attempt: Path, reason: Reason, detail: str = "") -> bool:
    """Write both files, the reason first. Returns whether this was the first request: the first one's reason holds."""
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
    """Seconds since the first request; 0 if nobody wrote one."""
    try:
        return time.time() - json.loads((attempt / REASON_FILE).read_text(encoding="utf-8"))["at"]
    except (FileNotFoundError, ValueError, KeyError):
        return 0.0


def stop_reason(attempt: Path) -> Reason | None:
    """Why the attempt was asked to stop: None if it was not, `user` if nobody wrote a reason."""
    if not stop_requested(attempt):
        return None
    try:
        reason = (read_shared(attempt / REASON_FILE) or {}).get("reason")
    except ValueError:
        return "user"
    return reason if reason in get_args(Reason) else "user"
