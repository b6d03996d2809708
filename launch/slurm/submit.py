"""From a configuration to a submitted job: plans, checks the margin, renders, lets Slurm test the script, submits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import launch
from launch.errors import UserError
from launch.files.shared import write_atomically
from launch.planner.prepare import OnCluster, prepare_job
from launch.slurm.client import Slurm
from launch.slurm.margin import explained, stop_margin
from launch.slurm.profiles import Profile, load_profile
from launch.slurm.records import Estimate
from launch.slurm.render import Flags, Places, render

Say = Callable[[str], None]
TIME = re.compile(r"(?:(?P<days>\d{1,6})-)?(?P<rest>\d{1,8}(?::\d{1,8}){0,2})?", re.ASCII)
"""Formats of sbatch --time: minutes, minutes:seconds, hours:minutes:seconds, days-[hours[:minutes[:seconds]]]. Numbers
need no leading zeros. Zero means no limit."""
NO_LIMIT = ("unlimited", "infinite", "-1")


@dataclass(frozen=True)
class Submission:
    """A job that is ready to submit."""

    prepared: OnCluster
    profile: Profile
    script: str
    margin: str
    """The parts of the stop margin."""
    folder: Path
    """Folder of the script and the job's output: `<run.dir>/<run.name>/slurm`."""


def compose(config: str, words: Sequence[str], flags: Flags, *, profile: str | None = None,
            spares: int | None = None) -> Submission:
    """Plan a configuration and render its batch script. Does not query Slurm and writes nothing.

    Raises:
        UserError: the configuration, the plan, the profile or the margin is invalid.
    """
    words = [*words, *([f"run.profile={profile}"] if profile is not None else []),
             *([f"placement.spare_nodes={spares}"] if spares is not None else [])]
    limit = seconds(flags.time)
    prepared = prepare_job(config, words)
    run = prepared.config.run
    site = load_profile(run.profile)
    margin_s = stop_margin(prepared.config, prepared.plan, site)
    if limit is not None and limit <= margin_s:
        raise UserError(f"--time {flags.time} is {limit} s, but the job stops {margin_s} s before the end, so it would "
                        "stop at once", where="--time", fix="give more time")
    folder = Path(run.dir).absolute() / run.name / "slurm"
    root, here = Path(launch.__file__).resolve().parents[1], Path.cwd()
    places = Places(root=str(root), work_dir=None if here == root else str(here), python=sys.executable,
                    output=_pattern(folder))
    text = render(config, words, prepared.config, prepared.plan, site, flags=flags, places=places,
                  margin_s=margin_s, plan_hash=prepared.plan.fingerprint())
    return Submission(prepared, site, text, explained(prepared.config, prepared.plan, site), folder)


def submit(job: Submission, say: Say, slurm: Slurm | None = None) -> str:
    """Write the script, create the folder of its output, let Slurm test it, submit it. Returns the job's id.

    Raises:
        UserError: the folder cannot be written.
        SlurmError: Slurm refuses.
    """
    slurm = slurm or Slurm()
    if slurm.dropped:
        say(f"removed from the submission's environment: {', '.join(slurm.dropped)} (they would change the "
            "request)")
    script = _written(job)
    say(_estimated(slurm.test_only(script)))
    job_id = slurm.submit(script)
    say(f"submitted {script}; output: {job.folder / f'{job_id}.log'}")
    return job_id


def make_folder(job: Submission) -> None:
    """Create the folder of the job's output. Without it, Slurm fails the job silently."""
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error, job.folder) from error


def _written(job: Submission) -> Path:
    """Write the script to a separate file, from which the job may be submitted again."""
    script = job.folder / f"{job.prepared.plan.fingerprint()}.sbatch"
    make_folder(job)
    try:
        write_atomically(script, job.script, mode=0o700)
    except OSError as error:
        raise _unwritable(error, script) from error
    return script


def _unwritable(error: OSError, path: Path) -> UserError:
    return UserError(f"cannot write {error.filename or path}: {error.strerror}", where="run.dir, run.name",
                     fix="set run.dir to a writable folder on a file system that all nodes share")


def _estimated(estimate: Estimate) -> str:
    if estimate.starts is None:
        return f"Slurm says: {estimate.text}"
    start = datetime.fromtimestamp(estimate.starts)
    where = f" in partition {estimate.partition}" if estimate.partition else ""
    return f"Slurm expects it to start at {start:%Y-%m-%d %H:%M:%S} on {len(estimate.nodes)} nodes{where}"


def seconds(time: str) -> int | None:
    """Seconds of a time limit in sbatch's format (sbatch rounds up to minutes); None for no limit.

    Raises:
        UserError: sbatch would not accept it.
    """
    if time.lower() in NO_LIMIT:
        return None
    match = TIME.fullmatch(time)
    if not time or match is None:
        raise UserError(f"--time {time} is not a Slurm time", where="--time",
                        fix="use minutes (90), hours:minutes:seconds (12:00:00) or days-hours (2-0)")
    parts = [int(part) for part in (match["rest"] or "0").split(":")]
    if match["days"] is not None:
        hours, minutes, secs = (parts + [0, 0])[:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = 0, *(parts + [0])[:2]
    return int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + secs or None


def _pattern(folder: Path) -> str:
    """sbatch's file pattern. `%` is its escape character, and spaces end an option."""
    text = str(folder).replace("%", "%%")
    return f'"{text}/%j.log"' if re.search(r"\s", text) else f"{text}/%j.log"
