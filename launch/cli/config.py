"""`megatron-rl config show`."""

from __future__ import annotations

import click

from launch.cli import options


@click.group()
def command() -> None:
    """Show a configuration, resolved, with the source of each value."""


@command.command()
@options.config_and_overrides
@click.option("--json", "as_json", is_flag=True, help="Print JSON: path, config, sources.")
def show(config: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every value of CONFIG after the overrides, and where it came from.

    The last column is the line of the file, the override, or `default`.
    """
    from launch.config import show as shown
    from launch.config.load import load_config

    loaded = load_config(config, overrides)
    click.echo(shown.as_json(loaded) if as_json else shown.as_text(loaded))
