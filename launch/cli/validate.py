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
    """Say whether CONFIG is valid: its keys and values, that they agree, and that a plan fits.

    Prints what was checked. A warning is no error: a file that a run needs and that is not here, what this version
    plans and does not run, what the plan warns of. Needs no GPU and no weights; where model.path names a folder, its
    config.json. Exit code 0 if it is valid, 2 if it is not, 3 if no plan fits.
    """
    import json

    from launch.errors import UserError
    from launch.report.plan import validity

    if config is None or Path(config).is_dir() or kind or no_leave_out:
        words = [*([config] if config else []), *overrides, *(["--kind", kind] if kind else []),
                 *(["--no-leave-out"] if no_leave_out else []), *(["--json"] if as_json else [])]
        raise click.UsageError("validate takes a configuration: megatron-rl validate configs/70b/grpo.yaml; measured "
                               f"points are compared by {shlex.join(['megatron-rl', 'plan', 'accuracy', *words])}")
    try:
        found = validity.validate(config, overrides, device)
    except UserError as error:
        if not as_json:
            raise
        click.echo(json.dumps(validity.refused(config, error), indent=1))
        return int(error.exit_code)
    click.echo(json.dumps(found.as_json(), indent=1) if as_json else found.as_text())
    return 0
