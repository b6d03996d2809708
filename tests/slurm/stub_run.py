"""A run of the stub workload in a test: composed as `megatron-rl launch --on slurm` does, submitted, watched by its
files. What a test does with a run is a scenario. Those of a module go on side by side, each in a thread: most of their
time is waiting for Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch import envvars
from launch.files.shared import write_atomically
from launch.run.attempt_log import PastAttempt, read_history
from launch.run.attempts import Attempt
from launch.run.components import component
from launch.run.outcome import Outcome, read_outcome
from launch.run.progress import read_progress, steps_done
from launch.slurm.render import Flags
from launch.slurm.submit import compose
from tests.launcher_stub import VARIABLES
from tests.launcher_stub.process import HOLD_VARIABLE, STEP_VARIABLE
from tests.patience import patient, still_there
from tests.slurm_cluster import SlurmCluster

CONFIG = "configs/tiny/grpo.yaml"
CLUSTER = """\
nodes: {{count: {nodes}, names: "planned-[001-{nodes:03d}]"}}
gpus: {{kind: H100-SXM-80GB, per_node: 8}}
network: {{nics_per_node: 8, nic_gbit_per_s: 400, rails: 8}}
host: {{memory_gb: 2048}}
"""
WORDS = ("trainer.tp=2", "trainer.pp=2", "trainer.dp=2", "rollout.replicas=auto",
         "algorithm.prompts_per_step=512", "algorithm.group_size=2", f"run.hang_min_s={patient(8)}",
         f"run.node_silent_s={patient(8)}")
"""A node of 8 GPUs trains, the others roll out."""


class StubRun:
    """One run on `nodes` nodes.

    Args:
        folder: of the test; runs of different names may share it.
        step_s: what a step of the stub takes.
        hold: the step at which it waits for `go`; later attempts then pass it.
        fault: `MEGATRON_RL_FAULT`.
        gpus: what the preflight finds (`launch.health.simulated`); None: healthy nodes.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path, name: str, nodes: int, *words: str, steps: int = 10,
                 step_s: float = 0.1, hold: int = 0, fault: str = "", gpus: Mapping | None = None,
                 time: str = "10:00") -> None:
        self.slurm, self.name, self.folder = slurm, name, folder / "runs" / name
        cluster = folder / f"{name}-cluster.yaml"
        cluster.write_text(CLUSTER.format(nodes=nodes), encoding="utf-8")
        self.words = (f"cluster={cluster}", f"run.dir={folder / 'runs'}", f"run.name={name}", f"run.steps={steps}",
                      *WORDS, *words)
        self.variables = {**VARIABLES, STEP_VARIABLE: str(step_s)}
        self.gate = folder / f"{name}-go"
        if hold:
            self.variables[HOLD_VARIABLE] = f"{hold}:{self.gate}"
        if fault:
            self.variables["MEGATRON_RL_FAULT"] = fault
        self.gpus = folder / f"{name}-gpus.json"
        if gpus is not None:
            self.find(gpus)
            self.variables[envvars.SIMULATED_GPUS] = str(self.gpus)
        job = compose(CONFIG, self.words, Flags(time=time))
        self.planned = job.prepared
        job.folder.mkdir(parents=True)
        self.script = job.folder / "job.sbatch"
        self.script.write_text(job.script, encoding="utf-8")
        self.job = 0
        """The first job, once it is submitted."""

    def submit(self, *options: str) -> StubRun:
        self.job = self.slurm.submit(*options, str(self.script), variables=self.variables)
        return self

    def go(self) -> None:
        """On past the step that was held."""
        self.gate.touch()

    def find(self, gpus: Mapping) -> None:
        """From now on, this is what checks find on the nodes (of a run that was given `gpus`)."""
        write_atomically(self.gpus, json.dumps(gpus))

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.folder / "attempts" / str(number))

    def history(self) -> list[PastAttempt]:
        return read_history(self.folder)

    def outcome(self, number: int) -> Outcome:
        outcome = read_outcome(self.attempt(number).folder)
        assert outcome is not None, f"attempt {number} has not ended"
        return outcome

    def step(self, number: int) -> int:
        """Steps that an attempt has made."""
        return steps_done(read_progress(self.attempt(number).folder))

    def at_step(self, number: int, step: int, timeout_s: float = 60.0) -> None:
        self.slurm.wait_until(lambda: self.step(number) >= step, f"step {step} of attempt {number}\n{self.text()}",
                              timeout_s)

    def ended(self, attempts: int, timeout_s: float = 90.0) -> list[PastAttempt]:
        """Wait until the history holds so many attempts and no job of this run is left; the history."""
        def done() -> bool:
            return len(self.history()) >= attempts and not self.slurm.run(
                "squeue", "--noheader", f"--name={self.name}").stdout.strip()

        try:
            self.slurm.wait_until(done, "the run to end", timeout_s)
        except AssertionError as error:
            queue = self.slurm.run("squeue", "--noheader", "--format=%A %j %T %r %S %N", check=False).stdout
            raise AssertionError(f"{error}\n{self.history()}\n{self.state}\nin the queue:\n{queue}"
                                 f"{self.text()}") from error
        assert self.left_running() == []
        return self.history()

    def left_running(self) -> list[str]:
        """Processes that carry a mark of this run."""
        return [process for folder in (self.folder / "attempts").glob("*")
                for process in still_there(Attempt(folder).mark)]

    @property
    def state(self) -> dict[str, str]:
        """What Slurm says of the first job."""
        return self.slurm.job(self.job)

    def questions(self, number: int) -> list[str]:
        """What the leader asked Slurm until its job ran."""
        return json.loads((self.attempt(number).folder / "slurm-calls.json").read_text())

    def given(self, number: int) -> list[str]:
        """The nodes that an attempt's job had."""
        return json.loads((self.attempt(number).folder / "job.json").read_text())["nodes"]

    def node_of(self, number: int, name: str) -> str:
        return component(self.attempt(number), name).node

    def text(self) -> str:
        """Output of all jobs of this run, and its supervisors' logs."""
        files = sorted((self.folder / "slurm").glob("*.log")) + sorted(self.folder.glob("attempts/*/logs/*.log"))
        return "\n".join(f"--- {os.path.relpath(file, self.folder)}\n{file.read_text(errors='replace')[-3000:]}"
                         for file in files)


Scenario = Callable[[SlurmCluster, Path], StubRun]
"""Makes a run in a folder, submits it, does to it what is to be done, and returns it when nothing follows any more."""


def side_by_side(slurm: SlurmCluster, folder: Path, *scenarios: Scenario) -> dict[str, StubRun]:
    """The runs of all scenarios, by name."""
    with ThreadPoolExecutor(len(scenarios)) as pool:
        going = [pool.submit(scenario, slurm, folder) for scenario in scenarios]
    return {run.name: run for run in (each.result() for each in going)}


def alone(name: str, nodes: int, *words: str, attempts: int = 1, options: tuple[str, ...] = (),
          **settings: object) -> Scenario:
    """A run to which nothing is done: it ends by itself after so many attempts."""
    def play(slurm: SlurmCluster, folder: Path) -> StubRun:
        run = StubRun(slurm, folder, name, nodes, *words, **settings).submit(*options)
        run.ended(attempts, timeout_s=150)
        return run

    return play
