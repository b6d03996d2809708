"""`megatron-rl stop`."""

from __future__ import annotations

import click


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--dir", "folder", default="runs", show_default=True, help="Folder of all runs (run.dir).")
def command(run: str, folder: str) -> None:
    """Ask RUN to write a checkpoint and end at the next step boundary.

    RUN is a run's name, or the path of its folder. Writes the file `stop` into the newest attempt; the job answers
    when its current step is done.
    """
    from launch.runtime.stop_file import request_stop

    click.echo(f"asked to stop: {request_stop(run, folder)}")
