"""The controller's clock against this machine's: a time limit ends a job by the controller's. Pure."""

from __future__ import annotations

import re

from launch.slurm.records import JobRecord

TOLERATED_S = 5.0
"""Slurm prints whole seconds, and takes some to answer."""
_RUN_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)")


def ahead_s(record: JobRecord, asked: float, answered: float) -> float:
    """How far the controller's clock is ahead of this machine's (negative: behind), 0.0 if that may be less than
    `TOLERATED_S` or cannot be said.

    Args:
        record: of a running job; the controller's time is that of its start and the time that it has run.
        asked, answered: this machine's time around the question.
    """
    match = _RUN_TIME.fullmatch(record.fields.get("RunTime", ""))
    if match is None or record.started is None or record.state != "RUNNING":
        return 0.0
    days, hours, minutes, seconds = (int(text or 0) for text in match.groups())
    there = record.started + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    least, most = there - answered, there + 1.0 - asked
    return least if least > TOLERATED_S else most if most < -TOLERATED_S else 0.0
