"""Asks a run to stop, on any machine. A job that is still in Slurm's queue is cancelled."""

from __future__ import annotations

from launch.errors import UserError
from launch.report.diagnose.ask_slurm import Hints, locate, unknown_job
from launch.run.find import Found, attempts_of
from launch.run.stop import STOP_FILE, ask_to_stop
from launch.slurm.records import JobRecord


def stop_run(run: str, folder: str) -> str:
    """Stop a run or job. Returns what was done.

    A running attempt gets its stop file and ends with a checkpoint at the next step boundary. A waiting job (first
    start or requeue) is cancelled, as there is nothing to save.

    Raises:
        UserError: the run does not exist, has no attempt yet, or has ended.
    """
    hints = Hints()
    found, record = locate(run, folder, hints)
    if record is None and found.job is not None:
        record = hints.record(found.job)
    if record is not None and record.state == "PENDING":
        hints.slurm.cancel(record.job_id)
        return f"cancelled job {record.job_id}, which was waiting in Slurm's queue; its checkpoints remain"
    if found.attempt is None:
        raise _nothing_to_stop(run, folder, found, record, hints)
    if found.ended and record is not None and record.state == "RUNNING" and (record.started or 0.0) > (
            found.attempt / "outcome.json").stat().st_mtime:
        raise _just_started(record)
    if found.ended:
        raise UserError(f"attempt {found.attempt.name} of run {found.name!r} has already ended",
                        where=str((found.attempt / "outcome.json").absolute()), fix="nothing to stop")
    ask_to_stop(found.attempt, "user")
    return f"stop requested: {found.attempt / STOP_FILE}"


def _nothing_to_stop(run: str, folder: str, found: Found, record: JobRecord | None, hints: Hints) -> UserError:
    if found.folder is not None and not attempts_of(found.folder):
        return UserError(f"run {found.name!r} has no attempt yet", where=str((found.folder / "attempts").absolute()),
                         fix="start it first")
    if record is None:
        return unknown_job(run, folder, hints)
    if record.state == "RUNNING":
        return _just_started(record)
    return UserError(f"job {record.job_id} has already ended: {record.state}", fix="nothing to stop")


def _just_started(record: JobRecord) -> UserError:
    return UserError(f"job {record.job_id} has just started and has not written anything yet", where=record.stdout,
                     fix=f"try again in a few seconds, or end it without a checkpoint: scancel {record.job_id}")
