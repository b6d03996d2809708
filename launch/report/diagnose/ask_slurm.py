"""What Slurm says of a run's job, for those who read the run's files first: one question every 30 s at most, and no
answer is not an error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from launch.errors import UserError
from launch.report.diagnose.doctor import Diagnosis, diagnose
from launch.report.diagnose.status import Status, read_status
from launch.run.find import Found, find_run
from launch.run.outcome import read_outcome
from launch.slurm.client import Slurm
from launch.slurm.records import JobRecord
from launch.slurm.refusals import SlurmError


@dataclass
class Hints:
    """Records of jobs, asked for seldom."""

    every_s: float = 30.0
    slurm: Slurm = field(default_factory=Slurm)
    why_not: str = ""
    """What Slurm said in place of an answer."""
    _asked: dict[str, tuple[float, JobRecord | None]] = field(default_factory=dict)

    def record(self, job: str) -> JobRecord | None:
        """The job as Slurm knows it; None where it does not, or does not answer (`why_not`)."""
        asked_at, record = self._asked.get(job, (float("-inf"), None))
        if time.monotonic() - asked_at >= self.every_s:
            try:
                record, self.why_not = self.slurm.show_job(job), ""
            except SlurmError as error:
                record, self.why_not = None, error.what
            self._asked[job] = (time.monotonic(), record)
        return record

    def accounted(self, job: str) -> str:
        """A job that the controller has forgotten, from the accounting: `FAILED None exit=1:0 restarts=0`; or ""."""
        try:
            account = self.slurm.account(job)
        except SlurmError:
            return ""
        return f"{account.state.split()[0]} None exit={account.exit_code} restarts=0"

    def queued(self, name: str) -> JobRecord | None:
        """The user's newest waiting or running job of this name."""
        try:
            jobs = self.slurm.queue(name=name)
        except SlurmError as error:
            self.why_not = error.what
            return None
        return self.record(jobs[-1].job_id) if jobs else None


def status_of(run: str, folder: str, hints: Hints) -> Status:
    """The status of a run or a job; Slurm is asked where it can know more than the files.

    Raises:
        UserError: there is no such run, and Slurm knows no job of that name or number.
    """
    found, record = locate(run, folder, hints)
    if record is None and found.job is not None and not _final(found):
        record = hints.record(found.job)
    if record is None and found.folder is None:
        raise unknown_job(run, folder, hints)
    return read_status(found, time.time(), record)


def diagnosis_of(run: str, folder: str, attempt: int | None = None, hints: Hints | None = None) -> Diagnosis:
    """What is wrong with a run or job; Slurm's record, or else its accounting, where there is a job.

    Raises:
        UserError: there is no such run, and Slurm knows no such job.
    """
    hints = hints or Hints()
    found, record = locate(run, folder, hints, attempt)
    accounted = ""
    if record is None and found.job is not None:
        record = hints.record(found.job)
        accounted = "" if record else hints.accounted(found.job)
    if record is None and not accounted and found.folder is None:
        raise unknown_job(run, folder, hints)
    return diagnose(found, record, accounted, hints.why_not)


def locate(run: str, folder: str, hints: Hints, attempt: int | None = None) -> tuple[Found, JobRecord | None]:
    """The run or job; a run without a folder may still wait in Slurm's queue, under its name."""
    try:
        found = find_run(run, folder, attempt=attempt)
    except UserError:
        record = hints.queued(run)
        if record is None:
            raise
        return Found(run, None, None, record.job_id), record
    if found.folder is None and found.job and (record := hints.record(found.job)) and record.job_id != found.job:
        return find_run(record.job_id, folder), record      # 7_1 of an array has a number of its own, which runs know
    return found, None


def unknown_job(run: str, folder: str, hints: Hints) -> SlurmError:
    return SlurmError(f"no run here belongs to job {run}, and Slurm does not know it: {hints.why_not}",
                      where=f"{folder}/*/attempts/*/job.json",
                      fix="`squeue --me` lists your jobs; --dir names the folder of the runs")


def _final(found: Found) -> bool:
    """Whether the outcome leaves nothing to ask: an attempt that was stopped may have been requeued."""
    outcome = read_outcome(found.attempt) if found.attempt else None
    return outcome is not None and outcome.status in ("finished", "user_error")
