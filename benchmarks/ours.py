"""Runs this project's own command and reads its logs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.run.metrics import Row, attempt_dirs, metric_history

QUIET = ("run.resume=never", "eval.every=0", "eval.at_start=false", "eval.at_end=false", "checkpoint.every=0",
         "monitor.tensorboard=false", "monitor.samples_every=0")
"""Overrides of a measured run that switch off everything a step does not need."""


def train(config: str, run_dir: Path, overrides: Sequence[str], *, timeout_s: float, log: Path,
          command: str = "launch") -> list[Row]:
    """Run `megatron-rl launch CONFIG --on local` into `run_dir`, as `run_logged` does. Returns the history.

    Args:
        command: the module that is run as `megatron-rl`.
    """
    run_logged([sys.executable, "-m", command, "launch", config, "--on", "local", f"run.dir={run_dir.parent}",
                f"run.name={run_dir.name}", *overrides], timeout_s=timeout_s, log=log)
    return metric_history(attempt_dirs(run_dir))


def run_logged(command: Sequence[str], *, timeout_s: float, log: Path) -> None:
    """Run a command with its output in `log`. Raises RuntimeError with the end of the log if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}\n{tail}")
