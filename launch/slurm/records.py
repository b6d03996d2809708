"""Parses the output of Slurm's commands into records. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from launch.cluster import hostlist
from launch.slurm import show
from launch.slurm.refusals import SlurmError

WHOLE_LINE = frozenset({"Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment",
                        "SystemComment"})
"""Fields of `scontrol show job` with a line of their own. Their text may contain spaces and equals signs."""
QUEUE_FORMAT = "%i|%T"
ESTIMATE = re.compile(r"Job \d+ to start at (?P<start>\S+) using \d+ processors on nodes (?P<nodes>\S+)"
                      r"(?: in partition (?P<partition>\S+))?")

CLOCK_TOLERATED_S = 5.0
"""Slurm prints whole seconds and takes some seconds to answer."""
_RUN_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)")


@dataclass(frozen=True)
class JobRecord:
    """A job as printed by `scontrol show job`. Times are seconds since 1970, None if Slurm prints Unknown."""

    job_id: str
    name: str
    state: str
    """RUNNING, PENDING, COMPLETED, FAILED, NODE_FAIL, ..."""
    reason: str
    partition: str
    account: str
    qos: str
    reservation: str
    nodes: tuple[str, ...]
    """In Slurm's order, which is the order of the tasks; () while the job waits."""
    node_count: int
    excluded: tuple[str, ...]
    started: float | None
    ends: float | None
    """When the time limit ends the job, or when a finished job ended."""
    time_limit: str
    requeue: bool
    restarts: int
    exit_code: int
    signal: int
    comment: str
    command: str
    """Path of the batch script and its arguments, joined by spaces."""
    work_dir: str
    stdout: str
    fields: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """All fields as printed."""


@dataclass(frozen=True)
class Queued:
    """One line of `squeue`."""

    job_id: str
    state: str

    @property
    def of_array(self) -> bool:
        """Whether the id is that of an array: `7_2`, or `7_[3-9]` for waiting tasks."""
        return "_" in self.job_id


@dataclass(frozen=True)
class Estimate:
    """The estimate of `sbatch --test-only`."""

    text: str
    starts: float | None = None
    nodes: tuple[str, ...] = ()
    partition: str | None = None


@dataclass(frozen=True)
class Account:
    """A job as printed by `sacct`."""

    state: str
    exit_code: str


def job_records(text: str) -> tuple[JobRecord, ...]:
    """Every job in the output of `scontrol show job` (an array or a heterogeneous job has several)."""
    return tuple(_record(block) for block in re.split(r"\n\s*\n", text.strip()) if "JobId=" in block)


def ahead_s(record: JobRecord, asked: float, answered: float) -> float:
    """Seconds by which the controller's clock is ahead of this machine's (negative: behind); 0.0 if that may be less
    than `CLOCK_TOLERATED_S` or is unknown.

    Args:
        record: a running job. The controller's time is the job's start time plus its run time.
        asked, answered: this machine's time before and after the query.
    """
    match = _RUN_TIME.fullmatch(record.fields.get("RunTime", ""))
    if match is None or record.started is None or record.state != "RUNNING":
        return 0.0
    days, hours, minutes, seconds = (int(text or 0) for text in match.groups())
    there = record.started + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    least, most = there - answered, there + 1.0 - asked
    return least if least > CLOCK_TOLERATED_S else most if most < -CLOCK_TOLERATED_S else 0.0


def estimate_of(text: str) -> Estimate:
    """Parse `Job 7 to start at ... using ... on nodes h100-[001-004] in partition batch`."""
    match = ESTIMATE.search(text)
    if match is None:
        return Estimate(text)
    return Estimate(text, moment(match["start"]), hostlist.expand(match["nodes"]), match["partition"])


def moment(text: str) -> float | None:
    """A time printed by Slurm as seconds since 1970; None for Unknown, N/A and (null)."""
    if text.isdecimal():
        return float(text)
    try:
        return datetime.fromisoformat(text).timestamp()        # in this machine's time zone, as Slurm prints it
    except ValueError:
        return None


def _record(block: str) -> JobRecord:
    fields: dict[str, str] = {}
    for line in block.splitlines():
        key, _, value = line.strip().partition("=")
        for name, text in {key: value}.items() if key in WHOLE_LINE else show.key_values(line.strip()).items():
            fields.setdefault(name, "" if text in ("(null)", "None") else text)
    status, _, number = fields.get("ExitCode", "0:0").partition(":")
    names = names_of(fields.get("NodeList", ""))
    count = re.match(r"\d+", fields.get("NumNodes", "0"))
    # After the partition's name, its line continues with a key that has a colon in its name: AllocNode:Sid.
    return JobRecord(
        job_id=fields["JobId"], name=fields.get("JobName", ""), state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""), partition=fields.get("Partition", "").split(" ")[0],
        account=fields.get("Account", ""), qos=fields.get("QOS", ""), reservation=fields.get("Reservation", ""),
        nodes=names, node_count=int(count[0]) if count else 0, excluded=names_of(fields.get("ExcNodeList", "")),
        started=moment(fields.get("StartTime", "")),
        ends=moment(fields.get("EndTime", "")), time_limit=fields.get("TimeLimit", ""),
        requeue=fields.get("Requeue") == "1", restarts=int(fields.get("Restarts", "0") or 0),
        exit_code=int(status or 0), signal=int(number or 0), comment=fields.get("Comment", ""),
        command=fields.get("Command", ""), work_dir=fields.get("WorkDir", ""), stdout=fields.get("StdOut", ""),
        fields=fields)


def names_of(text: str) -> tuple[str, ...]:
    """The names in a field with a host list; () if it is empty."""
    return hostlist.expand(text, "`scontrol show job`") if text else ()


def queued(line: str) -> Queued:
    """One line of `squeue --format=QUEUE_FORMAT`. Raises SlurmError."""
    job_id, separator, state = line.strip().partition("|")
    if not separator:
        raise SlurmError(f"not a line of squeue: {line[:100]}", where=f"`squeue --format={QUEUE_FORMAT}`")
    return Queued(job_id, state)
