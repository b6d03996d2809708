"""`megatron-rl launch --sweep`: submits seeds, learning rates or plans as job arrays and follows them, with submitit.

submitit provides a job array, with a future and a log for each job. A single job does not use it
(`launch.slurm.submit`): submitit requeues by the signal it receives and its own counter, but a run decides by its
outcome, its progress and the health of its nodes. For the same reason, a point of a sweep is never requeued
(run.max_attempts=1). The same sweep, submitted again, resumes stopped points from their checkpoints.

submitit's function runs in the batch shell, without its srun: the leader of a job starts its own step on all nodes.
Only the task's arguments are passed through a pickle on disk; results are read from outcome.json.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import envvars
from launch.config.load import ResolvedLoaded, load_config
from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.exit_codes import ExitCode
from launch.files.shared import write_atomically
from launch.run.outcome import Outcome
from launch.slurm import client, submit
from launch.slurm.client import Slurm
from launch.slurm.refusals import SlurmError
from launch.slurm.render import Flags
from launch.slurm.sweep_points import SweptRun, points, split
from launch.slurm.sweep_task import SweepTask, attempts_after, attempts_before, outcome_after

Say = Callable[[str], None]
LOOK_EVERY_S = 2.0
ASK_EVERY_S = 30.0
LATE_S = 90.0
"""Seconds after a job's end in which its outcome may become visible: file systems show remote writes late."""
LOCAL_MARGIN = 0.25
"""Share of a short time limit reserved for the last step and checkpoint of a run on one node; at most 10 minutes."""
NO_SIGNAL = "B:CONT@60"
"""submitit requests USR2 to the job's steps, which would end every process without a handler. CONT has no effect."""


@dataclass(frozen=True)
class Shape:
    """Resources of one job. Points with the same shape form one array."""

    nodes: int
    gpus_per_node: int
    whole_nodes: bool
    cpus: int | None = None

    def __str__(self) -> str:
        gpus = f" with {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''}{gpus}"


@dataclass
class SubmittedPoint:
    """A submitted point."""

    point: SweptRun
    task: SweepTask
    job: Any
    """submitit's future, `submitit.Job`."""
    before: int
    """The run's newest attempt when the point was submitted. Later attempts belong to the point."""
    ended: str = ""
    """Why it ended without an outcome; "" while it waits or runs, or if it has an outcome."""

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def outcome(self) -> Outcome | None:
        return outcome_after(Path(self.task.run_folder), self.before)

    @property
    def over(self) -> bool:
        return bool(self.ended) or self.outcome is not None


def run_sweep(config: str, words: Sequence[str], flags: Flags, say: Say, *, device: str = "auto",
              profile: str | None = None, spares: int | None = None, wait: bool = False,
              dry_run: bool = False) -> tuple[str, ExitCode]:
    """Plan, submit and optionally follow a sweep. Returns its table, and the worst exit code if it waited."""
    slurm = Slurm()
    gpus_there = device == "auto" and any(
        node.gpus for node in slurm.nodes() if flags.partition is None or flags.partition in node.partitions)
    planned = plan_sweep(config, words, flags, device=device, profile=profile, spares=spares, gpus_there=gpus_there)
    if dry_run:
        lines = [f"{point.name}: {shape}: {shlex.join(task.words)}" for point, task, shape in planned]
        return "\n".join(lines), ExitCode.OK
    submitted = submit_sweep(planned, flags, sweep_folder(planned), say)
    if wait:
        wait_for(submitted, say, slurm)
    return table(submitted), exit_code(submitted) if wait else ExitCode.OK


def sweep_folder(planned: Sequence[tuple[SweptRun, SweepTask, Shape]]) -> Path:
    """`<run.dir>/sweeps/<run.name>-<n>`: a new folder each time."""
    first, task, _ = planned[0]
    parent, number = Path(task.run_folder).parent / "sweeps", 1
    while (parent / f"{first.base}-{number}").exists():
        number += 1
    return parent / f"{first.base}-{number}"


def plan_sweep(config: str, words: Sequence[str], flags: Flags, *, device: str = "auto", profile: str | None = None,
               spares: int | None = None, gpus_there: bool = False) -> list[tuple[SweptRun, SweepTask, Shape]]:
    """Every point with its task and shape. Each is read, checked and, for a cluster, planned.

    Args:
        gpus_there: whether the nodes have GPUs, for `device` auto.
    """
    base = load_config(config, [word for word in words if len(split(word.partition("=")[2])) < 2]).config
    found = []
    for point in points(words, base.run.name):
        loaded = load_config(config, point.words)
        folder = (Path(loaded.config.run.dir) / point.name).absolute()
        log = str(folder / "slurm" / "launcher.log")
        if isinstance(loaded, ResolvedLoaded):          # for one machine
            on_gpu = device == "gpu" or (device == "auto" and gpus_there)
            limit = submit.seconds(flags.time)
            stop = limit - min(600.0, LOCAL_MARGIN * limit) if limit is not None else None
            task = SweepTask(str(folder), ("launch", config, *point.words, "--on", "local", "--quiet", "--device",
                                           "gpu" if on_gpu else "cpu"), log, stop)
            found.append((point, task, _one_node(loaded.config, on_gpu)))
        else:
            job = submit.compose(config, (*point.words, "run.max_attempts=1"), flags, profile=profile, spares=spares)
            nodes = job.prepared.needed + job.prepared.spares
            gpus = job.prepared.cluster.gpus_per_node if job.profile.gpus != "none" else 0
            extra = [*([f"run.profile={profile}"] if profile else []),
                     *([f"placement.spare_nodes={spares}"] if spares is not None else [])]
            task = SweepTask(str(folder), ("job", config, *point.words, "run.max_attempts=1", *extra), log)
            found.append((point, task, Shape(nodes, gpus, True)))
    return found


def submit_sweep(planned: Sequence[tuple[SweptRun, SweepTask, Shape]], flags: Flags, folder: Path,
                 say: Say) -> list[SubmittedPoint]:
    """Submit the points, with one array for each shape. The folder keeps submitit's scripts, logs and pickles.

    Raises:
        UserError: submitit is not installed, or two points write to one run.
        SlurmError: Slurm refuses.
    """
    submitit = _submitit()
    folder.mkdir(parents=True, exist_ok=True)
    submitted: list[SubmittedPoint] = []
    for shape in dict.fromkeys(shape for _, _, shape in planned):
        chosen = [(point, task) for point, task, other in planned if other == shape]
        for _, task in chosen:
            Path(task.log).parent.mkdir(parents=True, exist_ok=True)
        executor = submitit.SlurmExecutor(folder=folder / "%j", max_num_timeout=0)
        executor.update_parameters(**parameters(shape, flags, folder.name))
        before = [attempts_before(Path(task.run_folder)) for _, task in chosen]
        # submitit runs sbatch in this process's environment, where SBATCH_TIMELIMIT would win.
        with envvars.without(client.scrubbed(envvars.inherited())[1]), _refusals(submitit):
            jobs = executor.map_array(_call, [task for _, task in chosen])
        submitted += [SubmittedPoint(point, task, job, newest)
                      for (point, task), job, newest in zip(chosen, jobs, before, strict=True)]
        say(f"submitted {len(jobs)} jobs of {shape} as array {jobs[0].job_id.partition('_')[0]}")
    _record(folder, submitted)
    return submitted


def parameters(shape: Shape, flags: Flags, name: str) -> dict[str, object]:
    """submitit's parameters for one shape. Pure."""
    seconds = submit.seconds(flags.time)
    asked: dict[str, object] = {
        "job_name": name, "nodes": shape.nodes, "ntasks_per_node": 1, "use_srun": False, "stderr_to_stdout": True,
        "time": -(-seconds // 60) if seconds is not None else 0, "partition": flags.partition,
        "account": flags.account, "qos": flags.qos, "exclude": flags.exclude,
        "gpus_per_node": shape.gpus_per_node or None, "cpus_per_task": shape.cpus,
        "exclusive": True if shape.whole_nodes else None, "mem": "0" if shape.whole_nodes else None,
        "additional_parameters": {"signal": NO_SIGNAL, "no-requeue": True,
                                  **({"reservation": flags.reservation} if flags.reservation else {})}}
    return {key: value for key, value in asked.items() if value is not None}


def wait_for(submitted: Sequence[SubmittedPoint], say: Say, slurm: Slurm | None = None) -> None:
    """Wait until every point has ended: it has an outcome, or its job ended a while ago without one. The queue shows
    whether a job has ended. With accounting, submitit's future (which asks sacct) shows it sooner, except for a job
    that the accounting does not know."""
    slurm = slurm or Slurm()
    accounts = _keeps_accounts(slurm, submitted[0].job_id)
    queue, said = _Queue(slurm, say), set()
    ended_at: dict[str, float] = {}
    while True:
        now = time.monotonic()
        for one in submitted:
            if one.over:
                continue
            if not (accounts and one.job.done()) and queue.holds(one.job_id):
                ended_at.pop(one.job_id, None)
            elif now - ended_at.setdefault(one.job_id, now) >= LATE_S:
                one.ended = f"ended without an outcome: {one.job.state if accounts else 'not in the queue'}"
        for one in submitted:
            if one.over and one.job_id not in said:
                said.add(one.job_id)
                say(f"{one.point.name}: {state_of(one)}")
        if all(one.over for one in submitted):
            return
        time.sleep(LOOK_EVERY_S)  # between two reads of files that other processes write


class _Queue:
    """Jobs that wait or run, queried rarely. While Slurm does not answer, the last answer is used."""

    def __init__(self, slurm: Slurm, say: Say) -> None:
        self._slurm, self._say = slurm, say
        self._asked_at, self._silent = float("-inf"), False
        self._jobs: set[str] | None = None

    def holds(self, job_id: str) -> bool:
        if time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self._asked_at = time.monotonic()
            try:
                self._jobs, self._silent = {job.job_id for job in self._slurm.queue()}, False
            except SlurmError as error:
                if not self._silent:
                    self._say(f"{error.what}: trying again every {ASK_EVERY_S:g} s")
                self._silent = True
        if self._jobs is None:
            return True
        waiting = f"{job_id.partition('_')[0]}_["       # waiting tasks of an array are one row: `7_[0-3]`
        return job_id in self._jobs or any(each.startswith(waiting) for each in self._jobs)


def table(submitted: Sequence[SubmittedPoint]) -> str:
    """One line per point: job, run, state."""
    width = max(len(one.point.name) for one in submitted)
    lines = [f"{one.job_id:<12} {one.point.name:<{width}}  {state_of(one)}" for one in submitted]
    return "\n".join(line[:100] for line in lines)


def state_of(one: SubmittedPoint) -> str:
    outcome = one.outcome
    if outcome is None:
        started = attempts_after(Path(one.task.run_folder), one.before)
        return one.ended or ("runs" if started else "waits")
    first = outcome.message.strip().splitlines()[0] if outcome.message.strip() else ""
    return f"{outcome.status} after step {outcome.step}" + (f": {first}" if first else "")


def exit_code(submitted: Sequence[SubmittedPoint]) -> ExitCode:
    """The worst exit code of all points."""
    codes = [outcome.exit_code if (outcome := one.outcome) else ExitCode.CRASH for one in submitted]
    return max(codes, key=int)


def _call(task: SweepTask) -> dict[str, object]:
    return task()


def _one_node(config: ResolvedConfig, on_gpu: bool) -> Shape:
    """Shape of a run on one machine: one GPU per process, or its threads."""
    trainer, rollout = config.trainer, config.rollout
    ranks, engines = trainer.tp * trainer.pp * trainer.cp * trainer.dp, rollout.replicas * rollout.tp
    if on_gpu:
        return Shape(1, ranks + engines, False, 8 * (ranks + engines))
    return Shape(1, 0, False, ranks * trainer.threads + engines * rollout.threads)


def _record(folder: Path, submitted: Sequence[SubmittedPoint]) -> None:
    rows = [{"run": one.point.name, "folder": one.task.run_folder, "job_id": one.job_id,
             "values": one.point.values, "log": one.task.log} for one in submitted]
    write_atomically(folder / "sweep.json", json.dumps({"schema_version": 1, "points": rows}, indent=1))


def _keeps_accounts(slurm: Slurm, job_id: str) -> bool:
    try:
        slurm.account(job_id)
    except SlurmError as error:
        return "holds no job" in error.what         # sacct works, but the job is too new
    return True


def _submitit():
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise UserError("a sweep needs submitit, which is not installed", where="--sweep",
                        fix="pip install 'megatron-rl[slurm]'") from error
    return submitit


@contextmanager
def _refusals(submitit) -> Iterator[None]:
    """Turn Slurm's errors into messages instead of a traceback."""
    try:
        yield
    except submitit.core.utils.FailedJobError as error:
        text = str(error).strip()
        raise client.explain("sbatch, by submitit", 1, text) from error
    except RuntimeError as error:
        if "srun" not in str(error):
            raise
        raise SlurmError(str(error), where="--sweep", fix="run this on a machine in a Slurm cluster") from error

