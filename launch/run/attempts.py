"""The run directory: `runs/<name>/attempts/<n>/`. Each attempt has its own folder and overwrites no earlier one.

    runs/<name>/
        checkpoints/            complete checkpoints, shared by all attempts
        hf/step-<n>/            the trained weights as a Hugging Face folder
        weights/step-<n>/       the same for intermediate versions (weight_sync.disk)
        tensorboard/
        latest -> attempts/<n>
        attempts/<n>/
            config.yaml plan.json placement.json environment.json      inputs of the attempt
            environment/                                                environment of each process, secrets masked
            progress.json metrics.jsonl samples.jsonl rollouts/ warnings.jsonl    its progress
            trace.json                                                  timeline (ui.perfetto.dev)
            components/<node>/ logs/ stacks/ errors/                    one file per process
            dismissed/                                                  engines that the run continued without
            stop outcome.json plan-vs-measured.json                     its end
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml

from launch.config.resolved import ResolvedConfig, resolve
from launch.config.schema import Run, RunConfig
from launch.errors import UserError
from launch.files.shared import patiently, write_atomically
from launch.files.waiting import wait_for
from launch.plan.plan import Placement, Plan, read_plan
from launch.run.find import attempts_of

FRESH_NAMES = 1000
HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Error codes of flock if another process holds the lock; EACCES on NFS."""


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: its paths and its inputs."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def run_folder(self) -> Path:
        return self.folder.parent.parent

    @property
    def checkpoints(self) -> Path:
        return self.run_folder / "checkpoints"

    @property
    def weights(self) -> Path:
        """Folder of the weight versions, each a Hugging Face folder (`weight_sync.disk`)."""
        return self.run_folder / "weights"

    def exported(self, step: int) -> Path:
        """Hugging Face folder of the weights after `step`, if they were exported."""
        return self.run_folder / "hf" / f"step-{step:06d}"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def mark(self) -> str:
        """Value that marks every process of this attempt in its environment (`launch.envvars.JOB_MARK`)."""
        return str(self.folder.resolve())

    def config(self) -> ResolvedConfig:
        """The configuration of the attempt: the user's values in `config.yaml`, with the plan's choices for `auto`. The
        choices are only in `plan.json`, next to the ranks and stages made from them, so that the two files cannot
        disagree and `config.yaml` still shows the user's values. (Attempts of older versions have all values in
        `config.yaml`, and no choices in the plan.)

        Raises:
            UserError: the two files do not give a configuration that this version runs.
        """
        try:
            return resolve(self.asked(), self.plan().chosen)
        except ValueError as error:
            raise UserError(f"the attempt {self.folder} does not fit this version: {error}", where=str(self.folder),
                            fix="start a new attempt: megatron-rl launch CONFIG") from error

    def asked(self) -> RunConfig:
        """The configuration as the user wrote it, with overrides and defaults."""
        return RunConfig.model_validate(yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8")))

    def plan(self) -> Plan:
        return read_plan(json.loads((self.folder / "plan.json").read_text(encoding="utf-8")))

    def placement(self) -> Placement:
        return Placement.model_validate_json((self.folder / "placement.json").read_text(encoding="utf-8"))

    def write(self, asked: RunConfig, plan: Plan, placement: Placement, environment: dict[str, str]) -> None:
        """Record the inputs of the attempt, see `config`. `environment` holds the recordable variables
        (`envvars.recordable`)."""
        write_atomically(self.folder / "config.yaml", yaml.safe_dump(asked.model_dump(mode="json"), sort_keys=False))
        write_atomically(self.folder / "plan.json", plan.model_dump_json(indent=2))
        write_atomically(self.folder / "placement.json", placement.model_dump_json(indent=2))
        write_atomically(self.folder / "environment.json", json.dumps(environment, indent=2), mode=0o600)


class RunFolder:
    """A run's folder, locked while a launcher uses it, so that two jobs never write to one run."""

    def __init__(self, run: Run, *, wait_s: float = 0.0, say: Callable[[str], None] = print) -> None:
        """`wait_s`: how long to wait for a lock whose holder is dead or about to exit, in seconds."""
        self.folder, self._wait_s, self._say = Path(run.dir) / run.name, wait_s, say
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock = (self.folder / ".lock").open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the run's folder {self.folder.absolute()}: {error.strerror}",
                            where="run.dir, run.name", fix="set run.dir to a writable folder") from error
        try:
            held = wait_for(lambda: [] if _locked(lock) else [f"the lock of {self.folder}"], "to be free",
                            self._wait_s, say=self._say)
        except OSError as error:
            lock.close()
            raise UserError(f"the file system of {self.folder.absolute()} does not support locks: {error.strerror}",
                            where="run.dir", fix="put run.dir on a file system with flock (Lustre: mounted with -o "
                                                 "flock; NFS: with its lock service)") from error
        if held:
            lock.close()
            raise UserError(f"another job is using {self.folder}", where="run.name",
                            fix="wait for it, stop it with `megatron-rl stop`, or use another run.name")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def new_attempt(self) -> Attempt:
        """Create the next attempt's folder and point `latest` to it."""
        earlier = attempts_of(self.folder)
        folder = self.folder / "attempts" / str(int(earlier[-1].name) + 1 if earlier else 1)
        for name in ("logs", "components", "stacks", "errors"):
            (folder / name).mkdir(parents=True)
        link = self.folder / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("attempts") / folder.name)
        os.replace(link, self.folder / "latest")
        return Attempt(folder)


def _locked(file: IO[str]) -> bool:
    """Acquire the lock. Returns False if another process holds it."""
    try:
        patiently(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in HELD:
            return False
        raise       # ENOSYS, ENOLCK, EOPNOTSUPP: locking never works here
    return True


def fresh_name(run: Run) -> str:
    """`run.name` if no such run exists, else the first free name of name-2, name-3, ..."""
    for suffix in ["", *(f"-{number}" for number in range(2, FRESH_NAMES))]:
        if not (Path(run.dir) / (run.name + suffix)).exists():
            return run.name + suffix
    raise UserError(f"{run.dir} has {FRESH_NAMES} runs named {run.name}", where="run.name", fix="use another name")


