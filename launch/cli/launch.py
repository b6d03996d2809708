"""`megatron-rl launch`."""

from __future__ import annotations

import click

from launch.cli.options import config_and_overrides, device


@click.command()
@config_and_overrides
@click.option("--on", "where", type=click.Choice(["local"]), default="local", show_default=True,
              help="Where to run: this machine.")
@device
@click.option("--fresh", is_flag=True, help="Begin a new run: if run.name exists, take name-2, name-3, ...")
@click.option("--quiet", is_flag=True, help="No progress, only the end.")
def command(config: str, overrides: tuple[str, ...], where: str, device: str, fresh: bool, quiet: bool) -> int:
    """Train: plan CONFIG, start Ray, Megatron and vLLM, and run to the end.

    Ctrl-C once stops at the next step with a checkpoint; the same command then goes on from there.
    """
    from launch.config.load import load_config
    from launch.planner.prepare import prepare
    from launch.runtime.attempts import fresh_name
    from launch.runtime.local import run_local
    from launch.runtime.summary import print_end

    if fresh:
        overrides = (*overrides, f"run.name={fresh_name(load_config(config, overrides).config.run)}")
    prepared = prepare(config, overrides, device, to_run=True)
    attempt, outcome = run_local(prepared, quiet=quiet)
    print_end(attempt, outcome)
    return int(outcome.exit_code)
