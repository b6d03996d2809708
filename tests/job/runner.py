"""Starts real jobs through the command line and watches them from outside, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.processes import marked
from launch.run.attempts import Attempt
from launch.run.components import ComponentRecord, components
from launch.run.metrics import metric_rows
from launch.run.outcome import Outcome, read_outcome
from tests.patience import patient, still_there

CONFIG = "configs/tiny/grpo.yaml"
TIMES = ("time/", "idle/", "throughput/", "timestamp", "memory/", "sync/")
"""Prefixes of metrics that no two runs share."""


@dataclass
class Launched:
    """A `megatron-rl launch` process."""

    process: subprocess.Popen
    run_folder: Path
    output: Path
    number: int

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.run_folder / "attempts" / str(self.number))

    def rows(self) -> list[dict[str, float]]:
        return metric_rows(self.attempt.folder / "metrics.jsonl")

    def component(self, name: str) -> ComponentRecord:
        return next(record for record in components(self.attempt) if record.name == name)

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float = 300.0) -> None:
        """Wait for a condition of the running job; fail with the job's output when it ends or takes too long."""
        end = time.monotonic() + patient(deadline_s)
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.text()}"
            assert time.monotonic() < end, f"not within {patient(deadline_s):.0f} s: {what}\n{self.text()}"
            time.sleep(0.1)

    def at_step(self, step: int) -> None:
        self.until(lambda: len(self.rows()) >= step, f"step {step}")

    def end(self, deadline_s: float = 400.0) -> int:
        """Exit code; the job must leave no process behind."""
        code = self.process.wait(patient(deadline_s))
        assert still_there(self.attempt.mark) == []
        return code

    def outcome(self) -> Outcome:
        outcome = read_outcome(self.attempt.folder)
        assert outcome is not None, self.text()
        return outcome

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")


def launch(runs: Path, name: str, *overrides: str, attempt: int = 1, environment: dict[str, str] | None = None,
           config: str = CONFIG) -> Launched:
    """Start the tiny run as `name` under `runs`; `attempt` is the number it will get."""
    output = runs / f"{name}-{attempt}.out"
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch", "launch", config, "--on", "local", f"run.dir={runs}", f"run.name={name}",
             *overrides], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})})
    return Launched(process, runs / name, output, attempt)


def stop(job: Launched) -> None:
    """`megatron-rl stop`."""
    told = subprocess.run([sys.executable, "-m", "launch", "stop", str(job.run_folder)], capture_output=True,
                          text=True, check=True)
    assert str(job.attempt.folder / "stop") in told.stdout


def listening_addresses(mark: str) -> set[str]:
    """Addresses that the processes of a job listen on (TCP)."""
    found = set()
    for process in marked(mark):
        try:
            found |= {connection.laddr.ip for connection in process.net_connections("tcp")
                      if connection.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue
    return found


def evaluation(job: Launched, step: int) -> list[dict]:
    path = job.attempt.folder / f"eval-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
