"""`megatron-rl preflight`."""

from __future__ import annotations

from typing import Literal

import click

from launch.cli import options


@click.command()
@options.optional_config
@options.overrides
@click.option("--tier", type=click.Choice(["login", "node", "fabric"]), default="node", show_default=True,
              help="login: configuration, paths, plan. node: this machine, or every node of the allocation, too. "
                   "fabric: the network between them, too.")
@options.device
@click.option("--skip", multiple=True, metavar="CHECK", help="A check (gpu.ecc) or subject (gpu) that is told and "
                                                            "not judged; may be given again.")
@click.option("--ledger", type=click.Path(dir_okay=False), help="Ledger of bad nodes to respect.  "
                                                                "[default: that of the run]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--agent", type=click.Path(file_okay=False), hidden=True, help="Check this node for the command that "
                                                                            "started the step.")
def command(config: str | None, overrides: tuple[str, ...], tier: Literal["login", "node", "fabric"],
            device: options.Device, skip: tuple[str, ...], ledger: str | None, as_json: bool,
            agent: str | None) -> int:
    """Check what a job of CONFIG needs before it starts; without CONFIG, only what any job needs.

    Inside an allocation of Slurm's (salloc) all its nodes are checked, by one step. Prints node by check, the
    evidence and remedy of each finding, the verdict and the --exclude= line to paste. Exit code 5 if the job may not
    start.
    """
    import json

    from launch.health import command as preflight
    from launch.health.table import print_preflight

    if agent is not None:
        preflight.agent(agent)
        return 0
    if config is None and tier == "login":
        raise click.UsageError("the login tier checks a configuration: megatron-rl preflight configs/70b/grpo.yaml")
    request = preflight.Request(config, overrides, device, tier, skip, ledger)
    verdict = preflight.run(request, say=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(preflight.document(request, verdict), indent=1, allow_nan=False))
    else:
        print_preflight(verdict)
    return int(verdict.exit_code)
