"""`megatron-rl stop`."""

from __future__ import annotations

import click

from launch.cli import options


@click.command()
@click.argument("run", metavar="RUN|JOB")
@options.runs_folder
def command(run: str, folder: str) -> None:
    """Ask RUN to write a checkpoint and end at the next step boundary.

    RUN is a run's name, the path of its folder, or a Slurm job id. Writes the file `stop` into the newest attempt. The
    job reacts when its current step is done. A job that is still in Slurm's queue is cancelled.
    """
    from launch.runtime.stop_run import stop_run

    click.echo(stop_run(run, folder))
