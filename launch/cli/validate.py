"""`megatron-rl validate`, and the old spelling of `plan accuracy`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from launch.cli import options


@click.command()
@options.optional_config
@options.overrides
@options.device
@options.as_json
@click.option("--kind", hidden=True)
@click.option("--no-leave-out", is_flag=True, hidden=True)
def command(config: str | None, overrides: tuple[str, ...], device: options.Device, as_json: bool, kind: str | None,
            no_leave_out: bool) -> int:
    """Check whether CONFIG is valid: its keys and values, that they are consistent, and that a plan fits.

    Prints what was checked. Warnings are not errors: a missing file that a run needs, a feature that this version plans
    but does not run, a warning of the plan. Needs no GPU and no weights, only config.json if model.path is a folder.
    The exit code is 0 if CONFIG is valid, 2 if it is not, 3 if no plan fits.
    """
    import json

    from launch.errors import UserError
    from launch.report.plan import validity

    if config is None or Path(config).is_dir() or kind or no_leave_out:
        words = [*([config] if config else []), *overrides, *(["--kind", kind] if kind else []),
                 *(["--no-leave-out"] if no_leave_out else []), *(["--json"] if as_json else [])]
        raise click.UsageError("validate takes a configuration: megatron-rl validate configs/70b/grpo.yaml. To compare "
                               f"measured points, use {shlex.join(['megatron-rl', 'plan', 'accuracy', *words])}")
    try:
        found = validity.validate(config, overrides, device)
    except UserError as error:
        if not as_json:
            raise
        click.echo(json.dumps(validity.refused(config, error), indent=1))
        return int(error.exit_code)
    click.echo(json.dumps(found.as_json(), indent=1) if as_json else found.as_text())
    return 0
