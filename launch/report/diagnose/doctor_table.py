"""What `megatron-rl doctor` knows: how a failure shows itself, what causes it, what to do. docs/troubleshooting.md is
written from this table, one row a failure.

`logs` is searched for in every line of an attempt's logs, `slurm` in one line made of the job's record
(`FAILED NonZeroExitCode exit=1:0 restarts=0`), `outcome` in one made of outcome.json (`crash: trainer-1 died ...`).
"""

from __future__ import annotations

import re

from launch.report.diagnose.known.job import ENDS, JOB
from launch.report.diagnose.known.machine import GPU, MEMORY, NETWORK
from launch.report.diagnose.known.stack import STACK
from launch.report.diagnose.known.symptom import Symptom

GROUPS: tuple[tuple[str, tuple[Symptom, ...]], ...] = (
    ("The job and Slurm", JOB), ("Memory and disks", MEMORY), ("Network", NETWORK), ("GPUs", GPU),
    ("Environment, model and data", STACK), ("How attempts end", ENDS))
TABLE: tuple[Symptom, ...] = tuple(symptom for _, group in GROUPS for symptom in group)
BY_CODE = {symptom.code: symptom for symptom in TABLE}
PAGE = "docs/troubleshooting.md"
ANY_LOG = re.compile("|".join(f"(?:{symptom.logs})" for symptom in TABLE if symptom.logs))
"""One search instead of thirty for the lines that match nothing."""
