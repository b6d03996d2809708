"""`megatron-rl launch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from launch.cli import options

if TYPE_CHECKING:
    from launch.slurm.render import Flags


@click.command()
@options.config_and_overrides
@click.option("--on", "where", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
              help="Where to run: this machine, or the nodes that Slurm gives.")
@options.device
@click.option("--fresh", is_flag=True, help="Begin a new run: if run.name exists, take name-2, name-3, ...")
@click.option("--quiet", is_flag=True, help="No progress, only the end; on Slurm: no plan, only the job's id.")
@click.option("--dry-run", is_flag=True, help="Slurm: print the batch script; nothing is submitted.")
@click.option("--partition", metavar="NAME", help="Slurm: partition.")
@click.option("--account", metavar="NAME", help="Slurm: account.")
@click.option("--qos", metavar="NAME", help="Slurm: quality of service.")
@click.option("--reservation", metavar="NAME", help="Slurm: reservation.")
@click.option("--time", "time_limit", metavar="TIME", help="Slurm: time limit, such as 12:00:00; 24 hours without.")
@click.option("--exclude", metavar="LIST", help="Slurm: nodes not to use, such as node[007,011].")
@click.option("--profile", metavar="FILE", help="Slurm: site profile, as slurm/profiles/pyxis.yaml (run.profile).")
@click.option("--spares", type=click.IntRange(min=0), metavar="K",
              help="Slurm: nodes to ask for beyond the plan's (placement.spare_nodes).")
@click.option("--sweep", is_flag=True, help="Slurm: a run for each combination of values in words with commas "
              "(run.seed=0,1), as one array of jobs.")
@click.option("--wait", is_flag=True, help="With --sweep: wait for all runs and say how each ended.")
def command(config: str, overrides: tuple[str, ...], where: str, device: options.Device, fresh: bool, quiet: bool,
            dry_run: bool, partition: str | None, account: str | None, qos: str | None,
            reservation: str | None, time_limit: str | None, exclude: str | None, profile: str | None,
            spares: int | None, sweep: bool, wait: bool) -> int:
    """Train: plan CONFIG, start Ray, Megatron and vLLM, and run to the end.

    On this machine Ctrl-C once stops at the next step with a checkpoint; the same command then goes on from there. On
    Slurm the plan goes to standard error and the job's id alone to standard output.
    """
    of_slurm = {"--partition": partition, "--account": account, "--qos": qos, "--reservation": reservation,
                "--time": time_limit, "--exclude": exclude, "--profile": profile, "--spares": spares,
                "--dry-run": dry_run or None, "--sweep": sweep or None, "--wait": wait or None}
    _refuse_unused(where, "auto" if sweep else device, of_slurm)
    if (sweep and fresh) or (wait and not sweep):
        raise click.UsageError("--sweep names its runs itself: not with --fresh" if fresh else "--wait is for --sweep")
    if fresh:
        overrides = (*overrides, f"run.name={_fresh_name(config, overrides)}")
    if where == "local":
        return _local(config, overrides, device, quiet)

    from launch.slurm.render import Flags
    flags = Flags(partition=partition, account=account, qos=qos, reservation=reservation, exclude=exclude,
                  **({"time": time_limit} if time_limit is not None else {}))
    if sweep:
        return _sweep(config, overrides, flags, device, profile, spares, dry_run, wait, quiet)
    return _slurm(config, overrides, flags, profile, spares, dry_run, quiet)


def _sweep(config: str, overrides: tuple[str, ...], flags: Flags, device: options.Device, profile: str | None,
           spares: int | None, dry_run: bool, wait: bool, quiet: bool) -> int:
    from launch.slurm.sweep import run_sweep

    say = (lambda text: None) if quiet else (lambda text: click.echo(text, err=True))
    text, code = run_sweep(config, overrides, flags, say, device=device, profile=profile, spares=spares, wait=wait,
                           dry_run=dry_run)
    click.echo(text)
    return int(code)


def _refuse_unused(where: str, device: str, of_slurm: Mapping[str, object]) -> None:
    """An option that would be ignored is a mistake."""
    for option, value in of_slurm.items():
        if value is not None and where == "local":
            raise click.UsageError(f"{option} is for jobs of Slurm: give --on slurm with it")
    if where == "slurm" and device != "auto":
        raise click.UsageError("--device chooses on this machine; on Slurm the cluster file says what the nodes have")


def _fresh_name(config: str, overrides: tuple[str, ...]) -> str:
    from launch.config.load import load_config
    from launch.run.attempts import fresh_name

    return fresh_name(load_config(config, overrides).config.run)


def _local(config: str, overrides: tuple[str, ...], device: options.Device, quiet: bool) -> int:
    from launch.planner.prepare import prepare
    from launch.runtime.local import run_local
    from launch.runtime.summary import print_end

    prepared = prepare(config, overrides, device, to_run=True)
    attempt, outcome = run_local(prepared, quiet=quiet)
    print_end(attempt, outcome)
    return int(outcome.exit_code)


def _slurm(config: str, overrides: tuple[str, ...], flags: Flags, profile: str | None, spares: int | None,
           dry_run: bool, quiet: bool) -> int:
    from rich.console import Console

    from launch.report.plan.table import print_plan
    from launch.slurm.submit import compose, make_folder, submit

    job = compose(config, overrides, flags, profile=profile, spares=spares)

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    if not quiet:
        print_plan(job.prepared, Console(stderr=True, width=100, highlight=False))
    say(f"stop margin: {job.margin}")
    if dry_run:
        make_folder(job)
        say(f"output of the job: {job.folder}, which exists now (sbatch makes no folder)")
        click.echo(job.script, nl=False)
    else:
        click.echo(submit(job, say))
    return 0
