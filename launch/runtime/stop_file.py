"""The request to stop: a file named `stop` in the attempt's folder, which the job looks for at each step boundary."""

from __future__ import annotations

from pathlib import Path

from launch.errors import UserError

STOP_FILE = "stop"


def request_stop(run: str, runs_folder: str | Path = "runs") -> Path:
    """Write the stop file into the newest attempt of a run (its name, or the path of its folder); returns the file.

    Raises:
        UserError: there is no such run, it has no attempt yet, or the newest one has ended.
    """
    folder = Path(run) if (Path(run) / "attempts").is_dir() else Path(runs_folder) / run
    attempts = folder / "attempts"
    if not attempts.is_dir():
        known = sorted(path.parent.name for path in Path(runs_folder).glob("*/attempts"))
        raise UserError(f"there is no run {run!r}", where=str(folder.absolute()),
                        fix=f"runs here: {', '.join(known)}" if known else "give the run's folder, or --dir")
    numbers = [int(path.name) for path in attempts.iterdir() if path.name.isdecimal() and path.is_dir()]
    if not numbers:
        raise UserError(f"run {run!r} has no attempt yet", where=str(attempts.absolute()), fix="start it first")
    attempt = attempts / str(max(numbers))
    if (attempt / "outcome.json").exists():
        raise UserError(f"attempt {attempt.name} of run {run!r} has already ended",
                        where=str((attempt / "outcome.json").absolute()), fix="nothing to stop")
    file = attempt / STOP_FILE
    file.touch()
    return file


def stop_requested(attempt: Path) -> bool:
    """Whether somebody asked this attempt to stop."""
    return (attempt / STOP_FILE).exists()
