"""`megatron-rl status`."""

from __future__ import annotations

import click

from launch.cli import options

WATCH_EVERY_S = 2.0
ASK_SLURM_EVERY_S = 30.0


@click.command()
@click.argument("run", metavar="RUN|JOB")
@options.runs_folder
@click.option("--watch", is_flag=True, help="Print the state whenever it changes, until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --watch, one per change.")
def command(run: str, folder: str, watch: bool, as_json: bool) -> None:
    """Show the state of RUN: QUEUED > PREFLIGHT 16/16 > RAY 14/16 > LOAD > STEP 37/500.

    RUN is a run's name, the path of its folder, or a Slurm job id. The run's own files take precedence. Slurm is
    queried only for a job that has not ended, at most every 30 s.
    """
    import json
    import time

    from launch.report.diagnose.ask_slurm import Hints, status_of
    from launch.report.diagnose.status_text import state_line, status_text

    hints, said = Hints(ASK_SLURM_EVERY_S), None
    while True:
        status = status_of(run, folder, hints)
        shown = json.dumps(status.as_json()) if as_json else state_line(status) if watch else status_text(status)
        if not watch:
            click.echo(shown)
            return
        key = [str(stage) for stage in status.stages]
        if key != said:
            click.echo(f"{time.strftime('%H:%M:%S')}  {shown}" if not as_json else shown)
        said = key
        if status.over:
            if not as_json:
                click.echo(status_text(status))
            return
        time.sleep(WATCH_EVERY_S)  # between two reads of files that other processes write
