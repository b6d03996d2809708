"""Arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Callable

import click


def config_and_overrides(function: Callable) -> Callable:
    """CONFIG and any number of KEY=VALUE words; options may stand between them."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("config", type=click.Path(), metavar="CONFIG")(function)


device = click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True,
                      help="Where to run; auto takes the GPU if there is one and the GPU stack is installed.")
