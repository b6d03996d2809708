"""`megatron-rl sync`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from launch.cli import options

if TYPE_CHECKING:
    from launch.fabric.estimate import Kind


@click.group()
def command() -> None:
    """Draw the routes of the weight sync, or measure it."""


@command.command(short_help="Draw the routes of the weights in a plan.")
@options.config_and_overrides
@options.device
@click.option("--route", type=click.Choice(["direct", "chain", "tree"]), help="Draw only this route, not all three.")
@click.option("--all", "every_line", is_flag=True, help="Draw every line of a route, however many there are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(config: str, overrides: tuple[str, ...], device: options.Device, route: Kind | None, every_line: bool,
         as_json: bool) -> None:
    """Draw the routes that the weights may take from the trainers to the engines in the plan of CONFIG.

    Prints the three routes side by side, which one is chosen and why, then each as trees of nodes: how many bytes a
    node receives from its parent, and when the last of them arrive. Everything printed is predicted.
    """
    import json

    from launch.errors import UserError
    from launch.fabric.estimate import KINDS
    from launch.planner.prepare import OnCluster, PreparedForecast, prepare
    from launch.report.plan import sync_routes

    prepared = prepare(config, overrides, device)
    if not isinstance(prepared, PreparedForecast):
        raise UserError(f"this plan has no forecast: {prepared.plan.no_forecast}", where=config,
                        fix="correct this, or plan for a cluster: cluster=configs/clusters/h100x8.yaml")
    found, seating = prepared.found, prepared.seating if isinstance(prepared, OnCluster) else None
    if found.sync is None:
        raise UserError(f"in {found.mode} mode the weights stay on their GPUs, so there is no route to draw",
                        where=prepared.loaded.where("placement.mode"), fix="plan with placement.mode=disaggregated")
    coefficients = found.problem.coefficients.sync
    names = sync_routes.Names(seating.training_nodes if seating else (), seating.rollout_nodes if seating else (),
                              -(-found.training.layout.gpus // found.problem.cluster.gpus_per_node))
    on_gpus = found.problem.cluster.gpu.device == "gpu"
    needed = found.sync.needs if on_gpus else {}
    drawn = sync_routes.simulated(found.sync, coefficients, (route,) if route else KINDS)
    if as_json:
        click.echo(json.dumps(sync_routes.as_document(found.sync, drawn, names, needed), indent=1))
    else:
        click.echo(sync_routes.as_text(found.sync, drawn, names, needed, every_line=every_line))


@command.command(short_help="Measure the weight sync of a plan.")
@options.config_and_overrides
@options.device
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True,
              help="Syncs to measure after one warm-up; the median is printed.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--on", type=click.Choice(["local", "slurm"]), default="local", show_default=True,
              help="Where to run: on this machine, or on the nodes of the current allocation (salloc, sbatch).")
@click.option("--write", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="Also write the results into `coefficients:` of this cluster file.")
def bench(config: str, overrides: tuple[str, ...], device: str, repeats: int, as_json: bool, on: str,
          write: str | None) -> int:
    """Measure the weight sync of CONFIG's plan on this machine or on an allocation's nodes, and compare it with the
    prediction.

    The plan's ranks and workers run as plain processes with weights of the right shapes. They use the real sender,
    receiver, lanes, digests and protocol, without a trainer or an engine. Prints lanes, packing, digests and phases,
    and for each edge the predicted and measured seconds with the residual. Uses gloo on CPUs and NCCL on GPUs; NCCL has
    not been run yet.
    """
    import sys

    from launch.processes import run

    # A separate process, because it needs torch and vLLM and launch must not import them.
    arguments = [sys.executable, "-m", "megatron_rl.sync_bench", config, *overrides, "--device", device, "--repeats",
                 str(repeats), "--on", on, *(["--json"] if as_json else []), *(["--write", write] if write else [])]
    return run(arguments).returncode
