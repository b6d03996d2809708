"""`megatron-rl plan calibrate`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Fit the coefficients of a cluster file to measured runs.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option("--cluster", "cluster_file", required=True, metavar="FILE", help="Cluster file to write.")
def command(runs: tuple[Path, ...], cluster_file: str) -> None:
    """Fit the coefficients of a cluster file to runs on that cluster, and write them into it.

    RUN is the folder of a run or of one of its attempts. Runs of several sizes give a better fit than one.
    """
    from launch.planner.calibrate.calibrate import calibrate
    from launch.report.run.plan_vs_measured import print_calibration

    print_calibration(calibrate(runs[0], cluster_file, *runs[1:]))
