"""State of a run, from its files: stages passed, current stage, checkpoint, time left. Slurm's record is a hint.

    QUEUED > PREFLIGHT 16/16 > RAY 14/16 > LOAD > STEP 37/500 train

`read_status` only reads files. The caller asks Slurm (`launch.slurm.client`) and passes the record in.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from launch.run.attempt_log import read_history
from launch.run.find import Found, attempts_of, read_json
from launch.run.metrics import Row, metric_rows
from launch.run.outcome import read_outcome
from launch.run.progress import Progress, read_progress, steps_done
from launch.run.stop import stop_reason, stop_requested
from launch.slurm.records import JobRecord

LOCKS = Path("/proc/locks")

SCHEMA_VERSION = 1
RECENT = 20
"""Number of recent steps that the pace is computed from."""
SILENT_S = 30.0
"""A supervisor touches its beat file every 2 s, which a shared file system may show late."""
ENDS = {"finished": "FINISHED", "stopped": "STOPPED", "user_error": "ERROR", "crash": "CRASHED", "hang": "HUNG",
        "interrupted": "INTERRUPTED", "hardware_fault": "FAULT", "node_failure": "FAULT", "preflight": "UNFIT",
        "died": "DIED"}
"""Status of an outcome -> the last stage."""
_CHECKPOINT = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Stage:
    """One stage of a job: `RAY 14/16`."""

    name: str
    done: int | None = None
    of: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        count = "" if self.of is None else f" {self.done}/{self.of}"
        return f"{self.name}{count}{' ' + self.detail if self.detail else ''}"


@dataclass(frozen=True)
class NewestCheckpoint:
    step: int
    age_s: float
    path: str


@dataclass(frozen=True)
class Status:
    """Everything that `megatron-rl status` shows. Times are in seconds."""

    run: str
    state: str
    """Name of the last stage: QUEUED, PREFLIGHT, RAY, LOAD, STEP, STOPPING, FINISHED, STOPPED, ERROR, CRASHED, HUNG,
    INTERRUPTED, FAULT (hardware, a node), UNFIT (too few fit nodes), DIED, GONE (no outcome and no live process),
    ENDED (according to Slurm)."""
    stages: tuple[Stage, ...]
    """Stages so far. The last is the current stage, or how the job ended."""
    folder: str | None = None
    attempt: int | None = None
    attempts: int = 0
    job: str | None = None
    job_state: str | None = None
    """State according to Slurm, if it was asked."""
    restarts: int = 0
    partition: str | None = None
    waiting: str = ""
    """Why a job is waiting, if it is."""
    missing: tuple[str, ...] = ()
    """Nodes that the current stage waits for."""
    silent: tuple[str, ...] = ()
    """Nodes whose supervisor has not been heard from lately."""
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    step: int = 0
    """Completed steps."""
    steps: int | None = None
    checkpoint: NewestCheckpoint | None = None
    running_s: float | None = None
    left_s: float | None = None
    """Time until the time limit."""
    needed_s: float | None = None
    """Time for the remaining steps, at the pace of the last ones."""
    since_progress_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last row of metrics.jsonl."""
    outcome: Mapping[str, object] | None = None
    decision: str = ""
    """Decision of the launcher after the attempt: requeue, fresh job, stop."""
    warnings: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing more will happen without the user."""
        return not self.waiting and (self.outcome is not None or self.state in ("GONE", "ENDED"))

    def as_json(self) -> dict:
        return {"schema_version": SCHEMA_VERSION, **asdict(self), "line": " > ".join(map(str, self.stages))}


def read_status(found: Found, now: float, record: JobRecord | None = None, *, brief: bool = False) -> Status:
    """The status of a run's attempt, or of a job that has written nothing yet.

    Args:
        now: seconds since 1970.
        record: Slurm's record of the job. None if Slurm was not asked or does not know the job.
        brief: omit metrics, pace, checkpoint and decision, which need files that grow.
    """
    folder, run_folder = found.attempt, found.folder
    if folder is None or run_folder is None:
        return _only_slurm(found, now, record)
    job = read_json(folder / "job.json")
    outcome, progress = read_outcome(folder), read_progress(folder)
    placement, given = read_json(folder / "placement.json"), tuple(job.get("nodes") or ())
    nodes = tuple(placement.get("nodes") or given)
    stages, missing = _stages(folder, given, nodes, bool(placement), progress)
    steps = steps_of(folder)
    rows = [] if brief else metric_rows(folder / "metrics.jsonl")
    waiting = _waiting(record, now, first=False) if record and record.state == "PENDING" else ""
    alive, silent = _alive(run_folder, folder, given, now, record)
    if outcome is not None:
        stages.append(Stage(ENDS[outcome.status]))
    elif waiting or not alive:
        stages.append(Stage("GONE"))
    elif stop_requested(folder):
        stages.append(Stage("STOPPING", detail=stop_reason(folder) or ""))
    again = outcome is not None and _started_again(folder, record)
    if waiting or again:
        stages.append(Stage("QUEUED"))
    if again:
        stages.append(Stage("PREFLIGHT", detail="starting"))
        waiting = "requeued and started again: the next attempt has not written anything yet"
    done = outcome.step if outcome else steps_done(progress)
    ended = outcome is not None or not alive
    ends = job.get("end_time") or (record.ends if record and record.state == "RUNNING" else None)
    return Status(
        run=found.name, folder=str(run_folder), attempt=int(folder.name), attempts=len(attempts_of(run_folder)),
        state=stages[-1].name, stages=tuple(stages), job=found.job, job_state=record.state if record else None,
        restarts=record.restarts if record else int(job.get("restart_count") or 0), partition=job.get("partition"),
        waiting=waiting, missing=() if ended else missing, silent=() if ended else silent, nodes=nodes,
        spares=tuple(placement.get("spares") or ()), step=done, steps=steps,
        checkpoint=None if brief else newest_checkpoint(run_folder, now),
        running_s=None if ended else _started(folder, now),
        left_s=None if ended or not ends else ends - now,
        needed_s=None if ended or steps is None else _needed(rows, steps - done),
        since_progress_s=None if ended or progress is None else max(0.0, now - progress.at),
        metrics=rows[-1] if rows else {}, outcome=outcome.model_dump(mode="json") if outcome else None,
        decision="" if brief else _decision(run_folder, folder),
        warnings=_warnings(rows, len(placement.get("rollout") or ())))


def newest_checkpoint(run_folder: Path, now: float) -> NewestCheckpoint | None:
    """The newest folder of `checkpoints/` with a complete.json, which is written last."""
    complete = [(int(match[1]), path) for path in (run_folder / "checkpoints").glob("step-*")
                if (match := _CHECKPOINT.fullmatch(path.name)) and (path / "complete.json").exists()]
    if not complete:
        return None
    step, path = max(complete)
    return NewestCheckpoint(step, max(0.0, now - (path / "complete.json").stat().st_mtime), str(path))


def _only_slurm(found: Found, now: float, record: JobRecord | None) -> Status:
    """A job whose leader has not started, a job that never made an attempt, or a run that was never started."""
    if record is None:
        return Status(run=found.name, folder=str(found.folder) if found.folder else None, job=found.job,
                      state="GONE" if found.job else "QUEUED", stages=(Stage("QUEUED"),),
                      waiting="" if found.job else "no attempt has been made yet")
    waiting = _waiting(record, now, first=record.restarts == 0) if record.state == "PENDING" else ""
    stages = [Stage("QUEUED")]
    if record.state in ("RUNNING", "CONFIGURING"):
        stages.append(Stage("PREFLIGHT", detail="starting"))
    elif record.state != "PENDING":
        stages.append(Stage("ENDED", detail=record.state))
    return Status(run=found.name if found.folder else record.name or found.name, state=stages[-1].name,
                  folder=str(found.folder) if found.folder else None, stages=tuple(stages), job=record.job_id,
                  job_state=record.state, restarts=record.restarts, partition=record.partition, nodes=record.nodes,
                  waiting=waiting, left_s=record.ends - now if record.ends and record.state == "RUNNING" else None)


def _stages(folder: Path, given: tuple[str, ...], nodes: tuple[str, ...], placed: bool,
            progress: Progress | None) -> tuple[list[Stage], tuple[str, ...]]:
    """(stages so far, nodes that the last one waits for)."""
    stages: list[Stage] = []
    missing: tuple[str, ...] = ()
    if given:
        checked = {node for node in given if (folder / "nodes" / node / "preflight.json").exists()}
        stages += [Stage("QUEUED"), Stage("PREFLIGHT", len(checked), len(given))]
        missing = tuple(node for node in given if node not in checked)
        if placed and _uses_ray(folder):
            up = [node for node in nodes if (folder / "nodes" / node / "ray.json").exists()]
            missing = tuple(node for node in nodes if node not in up)
            stages.append(Stage("RAY", len(up), len(nodes)))
    else:
        stages.append(Stage("RAY"))
    if progress is None:
        return stages, missing
    if progress.step == 0:
        return [*stages, Stage("LOAD", detail=progress.newest.detail)], ()
    doing = ", ".join(span.name for span in progress.open)
    return [*stages, Stage("LOAD"), Stage("STEP", progress.step, steps_of(folder), doing)], ()


def _alive(run_folder: Path, folder: Path, given: tuple[str, ...], now: float,
           record: JobRecord | None) -> tuple[bool, tuple[str, ...]]:
    """(whether any process of the attempt is alive, nodes not heard from lately)."""
    if not given:                                   # one machine: the launcher holds the run's lock
        return lock_is_held(run_folder / ".lock") or bool(record and record.state == "RUNNING"), ()
    beats = {node: newest_beat(folder / "nodes" / node) for node in given}
    silent = tuple(node for node, beat in beats.items() if beat is not None and now - beat > SILENT_S)
    heard = any(beat is not None and now - beat <= SILENT_S for beat in beats.values())
    starting = now - (folder / "job.json").stat().st_mtime <= SILENT_S
    if record is not None:
        return record.state in ("RUNNING", "COMPLETING") or heard, silent
    return heard or starting, silent


def _waiting(record: JobRecord, now: float, *, first: bool) -> str:
    """Why a pending job is not hanging."""
    if record.reason == "BeginTime" and not first:
        begins = f" in {record.started - now:.0f} s" if record.started and record.started > now else ""
        return f"requeued; Slurm starts a requeued job about two minutes after its end{begins}: no action needed"
    known = {"Priority": "jobs of higher priority come first", "Resources": "the nodes are in use",
             "Dependency": "another job of this name, or one that it depends on, has to end first",
             "BeginTime": "its begin time has not come"}
    why = known.get(record.reason, f"Slurm's reason: {record.reason or 'none'}")
    return f"waits for its {'first ' if first else ''}start: {why}"


def _started_again(folder: Path, record: JobRecord | None) -> bool:
    """Whether the job was restarted after this attempt ended, but its leader has not made the next attempt yet."""
    if record is None or record.state not in ("RUNNING", "CONFIGURING"):
        return False
    return (record.started or 0.0) > (folder / "outcome.json").stat().st_mtime


def steps_of(folder: Path) -> int | None:
    """The value of `run.steps` of an attempt; None until its configuration is written."""
    return _run_section(folder).get("steps")


def _uses_ray(folder: Path) -> bool:
    """Whether the attempt uses Ray. A rehearsal does only if asked to."""
    return _run_section(folder).get("rehearse") in (None, False, "ray")


def _run_section(folder: Path) -> dict:
    """`run:` of the attempt's config.yaml. Only its lines are parsed: the whole takes 50 ms, and `runs` reads
    hundreds."""
    path = folder / "config.yaml"
    if not path.exists():
        return {}
    section = re.search(r"^run:\n(?:[ #].*\n|\n)*", path.read_text(encoding="utf-8"), re.MULTILINE)
    return yaml.safe_load(section[0])["run"] if section else {}


def _started(folder: Path, now: float) -> float:
    """Seconds since the attempt's first file was written."""
    first = next((folder / name for name in ("job.json", "config.yaml") if (folder / name).exists()), folder)
    return max(0.0, now - first.stat().st_mtime)


def _needed(rows: list[Row], left: int) -> float | None:
    times = [row["time/step"] for row in rows[-RECENT:] if "time/step" in row]
    return sum(times) / len(times) * left if times else None


def _decision(run_folder: Path, folder: Path) -> str:
    """What the launcher decided after this attempt: `requeue: a crash after new steps`."""
    for past in read_history(run_folder):
        if past.attempt == int(folder.name) and past.decision is not None:
            after = f"{past.decision} as job {past.successor}" if past.successor else past.decision
            return f"{after}: {past.why}" if past.why else after
    return ""


def _warnings(rows: list[Row], engines: int) -> tuple[str, ...]:
    """Warnings of the last step. `engines` is the number of engines of the placement."""
    last = rows[-1] if rows else {}
    found = [f"not a number in the last step: {', '.join(names[:3])}"
             for names in [sorted(name for name, value in last.items() if math.isnan(value))] if names]
    if (serving := last.get("engines/serving", engines)) < engines:
        found.append(f"{serving:.0f} of {engines} engines serve: warnings.jsonl says why")
    return tuple(found)


def lock_is_held(lock: Path) -> bool:
    """Whether a process of this machine holds `flock` on a file. Trying to take the lock would also answer, but could
    make a launcher that starts at this moment believe that another one works in the run."""
    try:
        status = lock.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        lines = LOCKS.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return False
    return any(words[1] == "FLOCK" and words[5] == wanted for words in map(str.split, lines)
               if len(words) > 5 and words[1] != "->")


def newest_beat(node_folder: Path) -> float | None:
    """When a node's supervisor was last heard from (seconds since 1970): its beat, or else its greeting."""
    for name in ("beat", "hello.json"):
        if (node_folder / name).exists():
            return (node_folder / name).stat().st_mtime
    return None
