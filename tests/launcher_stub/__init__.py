"""A workload that only steps and checkpoints, for tests of the launcher on a real Slurm.

A job whose environment holds `VARIABLES` starts it on every node in the place of the training. There is no key of the
configuration for this: see `launch.run.faults.WORKLOAD`.
"""

from __future__ import annotations

from launch.run.faults import WORKLOAD
from tests.slurm_cluster import REPOSITORY

VARIABLES = {WORKLOAD: "tests.launcher_stub.workload", "PYTHONPATH": str(REPOSITORY)}
