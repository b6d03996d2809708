"""`megatron-rl report`."""

from __future__ import annotations

from pathlib import Path

import click

from launch.cli import options


@click.command()
@click.argument("run", metavar="RUN")
@options.runs_folder
@click.option("--out", metavar="FILE", type=click.Path(),
              help="File to write.  [default: report.html in the run's folder]")
def command(run: str, folder: str, out: str | None) -> None:
    """Write the HTML report of RUN and print its reward curve.

    RUN is a run's name, or the path of its folder. The report is one self-contained file. It can be written while the
    run is in progress.
    """
    from launch.report.run.html import write_report
    from launch.report.run.plan_vs_measured import comparison_text, of_attempt
    from launch.report.run.terminal import closing_summary
    from launch.run.metrics import attempt_dirs, metric_history

    run_dir = Path(run) if Path(run).is_dir() else Path(folder) / run
    attempts = attempt_dirs(run_dir)
    click.echo(closing_summary(run_dir, metric_history(attempts)))
    compared = of_attempt(attempts[-1])
    if compared is not None:
        click.echo(comparison_text(compared))
    click.echo(f"report       {write_report(run_dir, Path(out) if out else None)}")
