"""Finds the run and attempt that a user names by run name, run folder, attempt folder or Slurm job id."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from launch.errors import UserError, nearest

JOB_FILE = "job.json"
_JOB_ID = re.compile(r"\d+(_\d+)?")


@dataclass(frozen=True)
class Found:
    """A run, a job that only Slurm knows, or both."""

    name: str
    """The run's name; the job id if no run belongs to it."""
    folder: Path | None
    """The run's folder."""
    attempt: Path | None
    """The selected attempt: the newest, or that of the job; None while there is none."""
    job: str | None = None
    """The Slurm job of the attempt, or the requested job."""

    @property
    def ended(self) -> bool:
        return self.attempt is not None and (self.attempt / "outcome.json").exists()


def find_run(run: str, runs_folder: str | Path = "runs", *, attempt: int | None = None) -> Found:
    """The run that `run` names.

    Args:
        run: a run's name, the path of its folder or of one of its attempts, or a Slurm job id. A folder with that name
            takes precedence over a job id.
        runs_folder: folder of all runs.
        attempt: this attempt instead of the newest.

    Raises:
        UserError: the run or attempt does not exist; the message names the nearest.
    """
    path = Path(run)
    if path.parent.name == "attempts" and path.is_dir():
        return _found(path.parent.parent, path if attempt is None else _attempt(path.parent.parent, attempt))
    folder = next((each for each in (path, Path(runs_folder) / run) if (each / "attempts").is_dir()), None)
    if folder is not None:
        return _found(folder, _attempt(folder, attempt))
    if _JOB_ID.fullmatch(run):
        of_job = [each for each in Path(runs_folder).glob("*/attempts/*") if job_of(each) == run]
        if of_job:
            newest = max(of_job, key=lambda each: (each.stat().st_mtime, int(each.name)))
            run_folder = newest.parent.parent
            return _found(run_folder, newest if attempt is None else _attempt(run_folder, attempt))
        return Found(run, None, None, run)
    raise UserError(f"there is no run {run!r}", where=str((Path(runs_folder) / run).absolute()),
                    fix=_nearest(run, Path(runs_folder)))


def runs_in(folder: Path) -> list[Path]:
    """The folders of all runs in `run.dir`, by name: folders with attempts or with the script of a Slurm job."""
    return sorted(path for path in folder.iterdir() if any((path / name).is_dir() for name in ("attempts", "slurm")))


def attempts_of(folder: Path) -> list[Path]:
    """`attempts/<n>` of a run, oldest first; [] if there is none yet."""
    attempts = folder / "attempts"
    if not attempts.is_dir():
        return []
    found = [path for path in attempts.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name))


def job_of(attempt: Path) -> str | None:
    """The Slurm job id that an attempt's leader recorded; None for a run on one machine."""
    job_id = read_json(attempt / JOB_FILE).get("job_id")
    return None if job_id in (None, "") else str(job_id)


def read_json(path: Path) -> dict:
    """A JSON object that another process writes with a rename; {} while it does not exist."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {error.msg}", where=str(path),
                        fix="remove the file, if no process writes it") from error
    return values if isinstance(values, dict) else {}


def _found(folder: Path, attempt: Path | None) -> Found:
    return Found(folder.resolve().name, folder, attempt, job_of(attempt) if attempt else None)


def _attempt(folder: Path, number: int | None) -> Path | None:
    existing = attempts_of(folder)
    if number is None:
        return existing[-1] if existing else None
    for path in existing:
        if int(path.name) == number:
            return path
    names = ", ".join(path.name for path in existing[-12:])
    raise UserError(f"run {folder.resolve().name!r} has no attempt {number}",
                    where=str((folder / "attempts").absolute()),
                    fix=f"attempts: {names}" if names else "the run has no attempts yet")


def _nearest(run: str, runs_folder: Path) -> str:
    known = sorted(path.parent.name for path in runs_folder.glob("*/attempts"))
    if not known:
        return "give the path of the run's folder, or --dir"
    close = nearest(run, known, alike=0.5)
    shown = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    return (f"did you mean {close}? " if close else "") + f"runs here: {shown}"
