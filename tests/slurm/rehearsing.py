"""A rehearsal in a test: submit, wait, read what it left."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.runtime.attempts import Attempt
from launch.runtime.outcome import read_outcome
from tests.slurm_cluster import SlurmCluster

SCRIPT_70B, SCRIPT_7B = "slurm/grpo_70b.sbatch", "slurm/grpo_7b.sbatch"


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
    began = time.monotonic()
    job = slurm.submit(f"--output={folder}/job.log", *options, script, "run.rehearse=true", f"run.dir={folder}/runs",
                       *words, variables=variables)
    return rehearsed(slurm, job, folder, ends=ends, timeout_s=timeout_s, began=began)


def rehearsed(slurm: SlurmCluster, job: int, folder: Path, *, ends: str = "COMPLETED", timeout_s: float = 150.0,
              began: float | None = None) -> Rehearsed:
    """The end of a rehearsal whose run lies in `folder/runs`."""
    began = time.monotonic() if began is None else began
    state = slurm.wait_for(job, ends, timeout_s=timeout_s)
    attempts = sorted(folder.glob("runs/*/attempts/*"))
    assert len(attempts) == 1, f"{attempts}\n{slurm.output(job)}"
    return Rehearsed(job, state, slurm.output(job), Attempt(attempts[0]), time.monotonic() - began)
