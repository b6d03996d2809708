"""What Slurm says about a run's job, for commands that read the run's files first. Slurm is asked at most every 30 s,
and a missing answer is not an error."""

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
    """Records of jobs, cached for `every_s`."""

    every_s: float = 30.0
    slurm: Slurm = field(default_factory=Slurm)
    why_not: str = ""
    """Slurm's error, if it gave no answer."""
    _asked: dict[str, tuple[float, JobRecord | None]] = field(default_factory=dict)

    def record(self, job: str) -> JobRecord | None:
        """The job as Slurm knows it. None if Slurm does not know it or does not answer (`why_not`)."""
        asked_at, record = self._asked.get(job, (float("-inf"), None))
        if time.monotonic() - asked_at >= self.every_s:
            try:
                record, self.why_not = self.slurm.show_job(job), ""
            except SlurmError as error:
                record, self.why_not = None, error.what
            self._asked[job] = (time.monotonic(), record)
        return record

    def accounted(self, job: str) -> str:
        """A job that the controller has forgotten, from accounting: `FAILED None exit=1:0 restarts=0`, or ""."""
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
    """The status of a run or a job. Slurm is asked only if it can know more than the files.

    Raises:
        UserError: the run does not exist, and Slurm knows no job of that name or number.
    """
    found, record = locate(run, folder, hints)
    if record is None and found.job is not None and not _final(found):
        record = hints.record(found.job)
    if record is None and found.folder is None:
        raise unknown_job(run, folder, hints)
    return read_status(found, time.time(), record)


def diagnosis_of(run: str, folder: str, attempt: int | None = None) -> Diagnosis:
    """What is wrong with a run or job. If there is a job, its Slurm record is used, or else its accounting entry.

    Raises:
        UserError: the run does not exist, and Slurm knows no such job.
    """
    hints = Hints()
    found, record = locate(run, folder, hints, attempt)
    accounted = ""
    if record is None and found.job is not None:
        record = hints.record(found.job)
        accounted = "" if record else hints.accounted(found.job)
    if record is None and not accounted and found.folder is None:
        raise unknown_job(run, folder, hints)
    return diagnose(found, record, accounted, hints.why_not)


def locate(run: str, folder: str, hints: Hints, attempt: int | None = None) -> tuple[Found, JobRecord | None]:
    """Find the run or job. A run without a folder may still wait in Slurm's queue under its name."""
    try:
        found = find_run(run, folder, attempt=attempt)
    except UserError:
        record = hints.queued(run)
        if record is None:
            raise
        return Found(run, None, None, record.job_id), record
    if found.folder is None and found.job and (record := hints.record(found.job)) and record.job_id != found.job:
        return find_run(record.job_id, folder), record      # array task 7_1 has its own job number, which the run uses
    return found, None


def unknown_job(run: str, folder: str, hints: Hints) -> SlurmError:
    return SlurmError(f"no run here belongs to job {run}, and Slurm does not know it: {hints.why_not}",
                      where=f"{folder}/*/attempts/*/job.json",
                      fix="`squeue --me` lists your jobs; --dir names the folder of the runs")


def _final(found: Found) -> bool:
    """Whether the outcome leaves nothing to ask Slurm. A stopped attempt may have been requeued."""
    outcome = read_outcome(found.attempt) if found.attempt else None
    return outcome is not None and outcome.status in ("finished", "user_error")
