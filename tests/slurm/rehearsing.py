"""A rehearsal in a test: submit, wait, read what it left."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.run.attempts import Attempt
from launch.run.outcome import read_outcome
from tests.slurm_cluster import SlurmCluster

SCRIPT_70B, SCRIPT_7B = "slurm/grpo_70b.sbatch", "slurm/grpo_7b.sbatch"
NOT_THE_JOBS = frozenset({"REQUEST_SUBMIT_BATCH_JOB", "REQUEST_STATS_INFO", "MESSAGE_NODE_REGISTRATION_STATUS",
                          "REQUEST_STEP_COMPLETE", "REQUEST_COMPLETE_BATCH_SCRIPT", "MESSAGE_EPILOG_COMPLETE"})
"""Messages to the controller that this test's commands and the nodes' daemons send."""


@dataclass(frozen=True)
class Rehearsed:
    """A rehearsal that has ended."""

    job: int
    state: dict[str, str]
    """`scontrol show job`."""
    output: str
    attempt: Attempt
    seconds: float
    """From submission to the end of the job."""
    asked: Mapping[str, int]
    """What the job sent to the controller from its start to its outcome, by the controller's own count."""

    @cached_property
    def report(self) -> dict[str, Any]:
        return json.loads((self.attempt.folder / "rehearsal.json").read_text())

    @cached_property
    def said(self) -> list[dict[str, Any]]:
        """Every process in its own words."""
        return [row for file in sorted(self.attempt.folder.glob("nodes/*/rehearsal.json"))
                for row in json.loads(file.read_text())]

    @property
    def outcome(self):
        return read_outcome(self.attempt.folder)


def rehearse(slurm: SlurmCluster, folder: Path, script: str, *words: str, options: tuple[str, ...] = (),
             variables: Mapping[str, str] | None = None, ends: str = "COMPLETED",
             timeout_s: float = 150.0) -> Rehearsed:
    """`sbatch SCRIPT run.rehearse=true ...` and its end."""
    job = slurm.submit(f"--output={folder}/job.log", *options, script, "run.rehearse=true", f"run.dir={folder}/runs",
                       *words, variables=variables)
    return rehearsed(slurm, job, folder, ends=ends, timeout_s=timeout_s)


def rehearsed(slurm: SlurmCluster, job: int, folder: Path, *, ends: str = "COMPLETED",
              timeout_s: float = 150.0) -> Rehearsed:
    """The end of a rehearsal, submitted just now, whose run lies in `folder/runs`."""
    began = time.monotonic()
    slurm.run("sdiag", "--reset")
    slurm.wait_until(lambda: list(folder.glob("runs/*/attempts/*/outcome.json")), f"the outcome of job {job}",
                     timeout_s)
    asked = _asked(slurm)
    state = slurm.wait_for(job, ends, timeout_s=timeout_s)
    attempts = sorted(folder.glob("runs/*/attempts/*"))
    assert len(attempts) == 1, f"{attempts}\n{slurm.output(job)}"
    return Rehearsed(job, state, slurm.output(job), Attempt(attempts[0]), time.monotonic() - began, asked)


def _asked(slurm: SlurmCluster) -> dict[str, int]:
    """Messages of a job to the controller since its count was reset."""
    by_type = slurm.run("sdiag").stdout.partition("by message type")[2].partition("by user")[0]
    found = re.findall(r"(\w+)\s*\(\s*\d+\) count:(\d+)", by_type)
    assert found, by_type
    return {name: int(count) for name, count in found if name not in NOT_THE_JOBS}
