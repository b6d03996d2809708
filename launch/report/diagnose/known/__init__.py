"""The table of known failures, a `Symptom` each, by what they are about. docs/troubleshooting.md is made from it."""

from __future__ import annotations

import re

from launch.report.diagnose.known.job import ENDS, JOB
from launch.report.diagnose.known.machine import GPU, MEMORY, NETWORK
from launch.report.diagnose.known.stack import STACK
from launch.report.diagnose.known.symptom import Symptom

GROUPS: tuple[tuple[str, tuple[Symptom, ...]], ...] = (
    ("The job and Slurm", JOB), ("Memory and disks", MEMORY), ("Network", NETWORK), ("GPUs", GPU),
    ("Environment, model and data", STACK), ("How attempts end", ENDS))
SYMPTOMS: tuple[Symptom, ...] = tuple(symptom for _, group in GROUPS for symptom in group)
BY_CODE = {symptom.code: symptom for symptom in SYMPTOMS}
IN_ANY_LOG = re.compile("|".join(f"(?:{symptom.logs})" for symptom in SYMPTOMS if symptom.logs))
"""One search instead of thirty for the lines that match nothing."""
