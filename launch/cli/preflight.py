"""`megatron-rl preflight`."""

from __future__ import annotations

from typing import Literal

import click

from launch.cli import options


@click.command()
@options.optional_config
@options.overrides
@click.option("--tier", type=click.Choice(["login", "node", "fabric"]), default="node", show_default=True,
              help="login: configuration, paths, plan. node: also this machine, or every node of the allocation. "
                   "fabric: also the network between them.")
@options.device
@click.option("--skip", multiple=True, metavar="CHECK", help="Check (gpu.ecc) or group (gpu) that is reported but "
                                                            "never fatal; repeatable.")
@click.option("--ledger", type=click.Path(dir_okay=False), help="Ledger of bad nodes to respect.  "
                                                                "[default: the run's ledger]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--agent", type=click.Path(file_okay=False), hidden=True, help="Check this node for the command that "
                                                                            "started the step.")
def command(config: str | None, overrides: tuple[str, ...], tier: Literal["login", "node", "fabric"],
            device: options.Device, skip: tuple[str, ...], ledger: str | None, as_json: bool,
            agent: str | None) -> int:
    """Check what a job of CONFIG needs before it starts. Without CONFIG, check only what every job needs.

    Inside a Slurm allocation (salloc), one job step checks all its nodes. Prints a table of nodes and checks, the
    evidence and remedy of each finding, the verdict and the --exclude= line to paste. The exit code is 5 if the job
    must not start.
    """
    import json

    from launch.health import command as preflight
    from launch.report.diagnose.preflight import print_preflight

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
