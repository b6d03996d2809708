"""The stub's process, one a node: `python -m tests.launcher_stub.process ATTEMPT NUMBER`.

What the launcher does around a job can be tested with it: processes that meet at every step, agree on the stop flag at
a step boundary, checkpoint, resume, die, hang. Number 0 is the driver as well: it writes the progress and the outcome.
A step takes `MEGATRON_RL_STUB_STEP_S` (0.1) seconds; `MEGATRON_RL_STUB_HOLD=STEP:FILE` holds that step until there is
the file; `MEGATRON_RL_FAULT` strikes at the point `step`.
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import sys
import threading
import traceback
from pathlib import Path

from launch import envvars
from launch.errors import UserError
from launch.files import waiting
from launch.files.shared import seen, write_atomically
from launch.run import faults
from launch.run.attempts import Attempt
from launch.run.components import record_error, register
from launch.run.outcome import Outcome, write_outcome
from launch.run.progress import write_progress
from launch.run.stop import stop_requested
from launch.runtime.hang import STACK_SIGNAL, stack_file
from tests.progress import doing

STEP_VARIABLE, HOLD_VARIABLE = "MEGATRON_RL_STUB_STEP_S", "MEGATRON_RL_STUB_HOLD"
MEETING = "stub"
"""Folder of the attempt in which the processes meet."""


def main() -> int:
    waiting.LOOK_EVERY_S = 0.02
    attempt, number = Attempt(Path(sys.argv[1])), int(sys.argv[2])
    name = f"trainer-{number}"
    register(attempt, name, envvars.get(envvars.NODE, ""))
    with stack_file(attempt, name).open("a", encoding="utf-8") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
        try:
            Stub(attempt, number).run()
        except Exception as error:
            traceback.print_exc()
            record_error(attempt, name, f"{type(error).__name__}: {error}", traceback.format_exc(),
                         user_error=isinstance(error, UserError))
            return 1
        finally:
            faulthandler.unregister(STACK_SIGNAL)
    return 0


class Stub:
    """One process."""

    def __init__(self, attempt: Attempt, number: int) -> None:
        self.attempt, self.number, self.config = attempt, number, attempt.config()
        self.numbers = range(len(attempt.placement().nodes))
        self.folder = attempt.folder / MEETING
        self.folder.mkdir(exist_ok=True)
        self.step_s = float(envvars.get(STEP_VARIABLE, "0.1"))
        held, _, self.until = envvars.get(HOLD_VARIABLE, "0:").partition(":")
        self.held = int(held)

    def run(self) -> None:
        """Step from the newest checkpoint to the last step, or to the one at which all agree to stop."""
        leads, last = self.number == 0, self.config.run.steps
        step = newest_step(self.attempt.checkpoints)
        if leads:
            print(f"from step {step}", flush=True)
            write_progress(self.attempt.folder, doing(step, "start", f"from step {step}"))
        self._meet(f"begin-{step}")
        stopped = False
        while step < last and not stopped:
            step += 1
            if leads:
                write_progress(self.attempt.folder, doing(step, "train", "", self.step_s))
            faults.strike(f"trainer-{self.number}", "step", step)
            threading.Event().wait(self.step_s)     # the work
            if step == self.held:
                meet(Path(self.until).parent, [Path(self.until).name], self.config.trainer.collective_timeout_s)
            if leads and stop_requested(self.attempt.folder):
                arrive(self.folder, f"stop-{step}")
            self._meet(f"step-{step}")
            stopped = (self.folder / f"stop-{step}").exists()
            every = self.config.checkpoint.every
            if leads and (stopped or step == last or (every and step % every == 0)):
                write_progress(self.attempt.folder, doing(step, "save", "", self.step_s))
                save(self.attempt.checkpoints, step)
        if leads:
            write_outcome(self.attempt.folder, Outcome(status="stopped" if step < last else "finished", step=step))
            write_progress(self.attempt.folder, doing(step, "end"))

    def _meet(self, point: str) -> None:
        """The first one arrives last, so that what it has written before all can read after it."""
        others = [f"{point}.{number}" for number in self.numbers if number]
        if self.number:
            arrive(self.folder, f"{point}.{self.number}")
            meet(self.folder, [f"{point}.0"], self.config.trainer.collective_timeout_s)
        else:
            meet(self.folder, others, self.config.trainer.collective_timeout_s)
            arrive(self.folder, f"{point}.0")


def arrive(folder: Path, name: str) -> None:
    (folder / name).touch()


def meet(folder: Path, names: list[str], deadline_s: float) -> None:
    """Wait until all signs are there: a meeting through a shared folder, as there are no collectives.

    Raises:
        TimeoutError: names the processes that did not arrive.
    """
    missing = waiting.wait_for(lambda: [name for name in names if not seen(folder / name)], "to arrive", deadline_s,
                               say=print)
    if missing:
        raise TimeoutError(f"did not arrive within {deadline_s:.0f} s: {', '.join(missing)}")


def save(checkpoints: Path, step: int) -> None:
    """A checkpoint with the frame of a real one: complete, or not there."""
    partial, whole = checkpoints / f".step-{step:06d}.partial", checkpoints / f"step-{step:06d}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_atomically(partial / "complete.json", json.dumps({"step": step, "files": {}}), durable=True)
    if not whole.exists():
        partial.rename(whole)


def newest_step(checkpoints: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    found = [int(path.parent.name.removeprefix("step-")) for path in checkpoints.glob("step-*/complete.json")]
    return max(found, default=0)


if __name__ == "__main__":
    sys.exit(main())
