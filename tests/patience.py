"""How much longer the deadlines of tests are on a machine slower than the one that they were written on.

The speed is measured once, before the first test: two interpreters side by side, as the suite runs two files side by
side. Load by others counts like slowness. A deadline says when to give up on something that should long have happened,
so a generous one costs nothing while all goes well. Times that a test expects to run out are not scaled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from launch import processes

VARIABLE = "MEGATRON_RL_TEST_PATIENCE"
"""The factor, for the processes that the tests start; set it to choose one."""
REFERENCE_S = 0.7
"""What the work takes on two quiet cores of the machine on which the deadlines were written."""
MOST = 10.0
_WORK = "sum(i * i % 7 for i in range(12_000_000))"


def patience() -> float:
    """The factor, at least 1."""
    return float(os.environ.get(VARIABLE, "1"))


def patient(seconds: float) -> float:
    """A deadline for this machine."""
    return seconds * patience()


def measure() -> float:
    """Measure the speed and keep the factor in the environment, unless it is there; returns it."""
    if VARIABLE not in os.environ:
        began = time.monotonic()
        working = [subprocess.Popen([sys.executable, "-S", "-c", _WORK]) for _ in range(2)]
        for each in working:
            each.wait()
        factor = min(MOST, max(1.0, (time.monotonic() - began) / REFERENCE_S))
        os.environ[VARIABLE] = f"{factor:.2f}"
    return patience()


def still_there(mark: str, within_s: float = 10.0) -> list[str]:
    """Processes of a job that has ended, those that are gone within a deadline left out: Ray's agents notice the end of
    their raylet only when they look."""
    return [processes.describe(each)
            for each in processes.still_running(processes.marked(mark), timeout_s=patient(within_s))]
