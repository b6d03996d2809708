"""The attempt whose logs somebody wants."""

from __future__ import annotations

from pathlib import Path

from launch.errors import UserError
from launch.run.find import find_run


def attempt_of(run: str, folder: str, number: int | None = None) -> Path:
    """The attempt of a run or job.

    Raises:
        UserError: there is no such run, or it has written nothing yet.
    """
    found = find_run(run, folder, attempt=number)
    if found.attempt is None:
        what = f"job {found.job} has made no attempt in {folder}/" if found.folder is None else (
            f"run {found.name!r} has no attempt yet")
        raise UserError(what, where=str(Path(folder).absolute()),
                        fix=f"megatron-rl status {run} says whether it waits; megatron-rl doctor {run} why it failed")
    return found.attempt
