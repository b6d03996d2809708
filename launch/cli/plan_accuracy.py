"""`megatron-rl plan accuracy`."""

from __future__ import annotations

import click

from launch.cli import options


@click.command(short_help="Compare the planner's predictions with measurements.")
@click.argument("directory", metavar="[DIR]", required=False)
@click.option("--kind", metavar="KIND", help="Only this kind of point: training, memory, decode, rl_steps, "
                                            "weight_sync, collectives or parameters.")
@click.option("--no-leave-out", is_flag=True, help="Skip the recalibration without each source.")
@options.as_json
def command(directory: str | None, kind: str | None, no_leave_out: bool, as_json: bool) -> None:
    """Compare the planner's predictions with measurements, and print the errors.

    DIR holds files in the format of benchmarks/measured/README.md; the default is the points of the repository. Prints
    the predicted value, measured value and error of each point, the medians of each regime and kind with their targets,
    the points that could not be predicted and why, and the error of each source's points when that source is left out
    of the calibration. The exit code is 0 however large the errors are.
    """
    import json

    from launch.accuracy.interface import KINDS
    from launch.accuracy.points import load
    from launch.accuracy.report import as_json as document
    from launch.accuracy.report import evaluate
    from launch.accuracy.score import DEVELOPMENT, module
    from launch.accuracy.table import print_report
    from launch.errors import UserError

    if kind is not None and kind not in KINDS:
        raise UserError(f"unknown kind of point: {kind}", where="--kind", fix=f"use one of {', '.join(KINDS)}")
    if directory is None and not DEVELOPMENT.is_dir():
        raise UserError("this installation has no measured points", where="megatron-rl plan accuracy DIR",
                        fix="name a directory of measured points, such as benchmarks/measured of the repository")
    report = evaluate(load(directory or DEVELOPMENT), kind, leave_out=not no_leave_out)
    if as_json:
        click.echo(json.dumps(document(report), indent=1, allow_nan=False))
    else:
        print_report(report, {name: module(name).QUANTITIES for name in {row.point.kind for row in report.rows}})
