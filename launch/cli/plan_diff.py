"""`megatron-rl plan diff`."""

from __future__ import annotations

import click


@click.command(short_help="Print the differences between two plans.")
@click.argument("first", metavar="A.json")
@click.argument("second", metavar="B.json")
def command(first: str, second: str) -> None:
    """Print the differences between two plans written by `megatron-rl plan CONFIG --out FILE`."""
    from launch.report.plan.diff import diff
    from launch.report.plan.file import load_plan

    click.echo(diff(load_plan(first), load_plan(second), names=(first, second)))
