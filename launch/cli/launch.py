"""`megatron-rl launch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from launch.cli import options

if TYPE_CHECKING:
    from launch.slurm.render import Flags


@click.command()
@options.config_and_overrides
@click.option("--on", "where", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
              help="Where to run: on this machine, or on nodes that Slurm allocates.")
@options.device
@click.option("--fresh", is_flag=True, help="Start a new run: if run.name exists, use name-2, name-3, ...")
@click.option("--quiet", is_flag=True, help="Print only the final summary; on Slurm, only the job id.")
@click.option("--dry-run", is_flag=True, help="Slurm: print the batch script and submit nothing.")
@click.option("--partition", metavar="NAME", help="Slurm: partition.")
@click.option("--account", metavar="NAME", help="Slurm: account.")
@click.option("--qos", metavar="NAME", help="Slurm: quality of service.")
@click.option("--reservation", metavar="NAME", help="Slurm: reservation.")
@click.option("--time", "time_limit", metavar="TIME", help="Slurm: time limit, such as 12:00:00.  [default: 24 hours]")
@click.option("--exclude", metavar="LIST", help="Slurm: nodes to exclude, such as node[007,011].")
@click.option("--profile", metavar="FILE", help="Slurm: site profile, such as slurm/profiles/pyxis.yaml (run.profile).")
@click.option("--spares", type=click.IntRange(min=0), metavar="K",
              help="Slurm: nodes to request beyond those of the plan (placement.spare_nodes).")
@click.option("--sweep", is_flag=True, help="Slurm: one job array with a run for each combination of the overrides "
              "that list several values (run.seed=0,1).")
@click.option("--wait", is_flag=True, help="With --sweep: wait for all runs and report how each ended.")
def command(config: str, overrides: tuple[str, ...], where: str, device: options.Device, fresh: bool, quiet: bool,
            dry_run: bool, partition: str | None, account: str | None, qos: str | None,
            reservation: str | None, time_limit: str | None, exclude: str | None, profile: str | None,
            spares: int | None, sweep: bool, wait: bool) -> int:
    """Train: plan CONFIG, start Ray, Megatron and vLLM, and run to the end.

    On this machine, one Ctrl-C stops the run at the next step with a checkpoint; the same command resumes it. On Slurm,
    the plan is printed to standard error and only the job id to standard output.
    """
    of_slurm = {"--partition": partition, "--account": account, "--qos": qos, "--reservation": reservation,
                "--time": time_limit, "--exclude": exclude, "--profile": profile, "--spares": spares,
                "--dry-run": dry_run or None, "--sweep": sweep or None, "--wait": wait or None}
    _refuse_unused(where, "auto" if sweep else device, of_slurm)
    if (sweep and fresh) or (wait and not sweep):
        raise click.UsageError("--sweep names its runs: remove --fresh" if fresh else "--wait needs --sweep")
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

    text, code = run_sweep(config, overrides, flags, _say(quiet), device=device, profile=profile, spares=spares,
                           wait=wait, dry_run=dry_run)
    click.echo(text)
    return int(code)


def _say(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: click.echo(text, err=True))


def _refuse_unused(where: str, device: str, of_slurm: Mapping[str, object]) -> None:
    """An option that would be ignored is a mistake."""
    for option, value in of_slurm.items():
        if value is not None and where == "local":
            raise click.UsageError(f"{option} applies to Slurm jobs only: add --on slurm")
    if where == "slurm" and device != "auto":
        raise click.UsageError("--device applies to this machine only; on Slurm the cluster file describes the nodes")


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

    job, say = compose(config, overrides, flags, profile=profile, spares=spares), _say(quiet)
    if not quiet:
        print_plan(job.prepared, Console(stderr=True, width=100, highlight=False))
    say(f"stop margin: {job.margin}")
    if dry_run:
        make_folder(job)
        say(f"job output: {job.folder}, created now because sbatch does not create folders")
        click.echo(job.script, nl=False)
    else:
        click.echo(submit(job, say))
    return 0
