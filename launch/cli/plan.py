"""`megatron-rl plan`."""

from __future__ import annotations

from pathlib import Path

import click

from launch.cli import options


@click.command()
@options.config_and_overrides
@options.device
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--out", type=click.Path(), help="Also write the plan as JSON to this file.")
def command(config: str, overrides: tuple[str, ...], device: str, as_json: bool, out: str | None) -> None:
    """Check CONFIG against its model and this machine, and print the plan.

    The plan takes the sizes that CONFIG pins (trainer.tp, rollout.replicas, ...). It searches for none and predicts
    neither memory nor time.
    """
    from launch.errors import UserError
    from launch.planner.prepare import prepare
    from launch.report.plan_table import print_plan

    prepared = prepare(config, overrides, device)
    text = prepared.plan.model_dump_json(indent=2)
    if out is not None:
        try:
            Path(out).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}", where=f"--out {Path(out).absolute()}",
                            fix="give a file in an existing, writable folder") from error
    if as_json:
        click.echo(text)
    else:
        print_plan(prepared)
