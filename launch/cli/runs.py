"""`megatron-rl runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launch.cli import options

if TYPE_CHECKING:
    from launch.report.diagnose.runs import By


@click.command()
@options.runs_folder
@click.option("--sort", "by", type=click.Choice(["when", "name", "state", "step"]), default="when", show_default=True,
              help="when: the latest activity first. step: most steps first.")
@options.as_json
def command(folder: str, by: By, as_json: bool) -> None:
    """List the runs in a folder: state, step, last activity, attempts, and the job of the newest attempt.

    Reads only the runs' files. `megatron-rl status RUN` shows more about one run, and queries Slurm.
    """
    import json
    import time
    from pathlib import Path

    from launch.report.diagnose import runs

    lines = runs.list_runs(Path(folder), time.time(), by)
    click.echo(json.dumps(runs.as_json(lines), indent=1) if as_json else runs.as_text(lines, Path(folder)))
