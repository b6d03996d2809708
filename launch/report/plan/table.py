"""The plan as tables, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from launch.config.checks import cautions
from launch.model.architecture import parameter_count
from launch.plan.plan import ForecastPlan, Plan
from launch.planner.prepare import Prepared
from launch.report.lines import ranges
from launch.report.plan.overview import WIDTH, print_overview, terminal


def print_plan(prepared: Prepared, console: Console | None = None, *, commands: Sequence[str] = ()) -> None:
    """Print a plan: its forecast and the reasons for a cluster, otherwise its partitions, batch and pipeline stages.

    Args:
        commands: commands to run next, one per line (only for plans with a forecast).
    """
    plan, architecture = prepared.plan, prepared.plan.architecture
    if isinstance(plan, ForecastPlan):
        print_overview(plan, str(prepared.loaded.path), console or terminal(), commands=commands)
        return
    console = console or Console(width=WIDTH, highlight=False)
    console.print(f"{prepared.loaded.path}: {architecture.family}, {parameter_count(architecture):,} parameters, "
                  f"{architecture.layers} layers, on {plan.device.upper()}; plan {plan.fingerprint()}", markup=False)
    console.print(_partitions(plan))
    console.print(_stages(plan))
    batch = plan.batch
    padding = f", sequences padded to multiples of {batch.sequence_multiple}" if batch.sequence_multiple > 1 else ""
    sharing = ", each prompt computed once for all its completions" if batch.share_prompts else ""
    updates = f"{batch.updates_per_batch} update{'s' if batch.updates_per_batch > 1 else ''}"
    console.print(f"step: {batch.prompts_per_step} prompts x {batch.group_size} completions = "
                  f"{batch.samples_per_step} sequences, {updates}; micro-batches of at most {batch.token_budget} "
                  f"tokens{padding}{sharing}")
    if plan.no_forecast:
        console.print(f"no forecast: {plan.no_forecast}", markup=False)
    for code, message in cautions(prepared.config):
        console.print(f"{code}: {message}", markup=False)


def _partitions(plan: Plan) -> Table:
    training = plan.training
    table = Table("partition", "processes", "layout", box=SIMPLE_HEAD)
    layout = f"TP {training.tp} x CP {training.cp} x DP {training.dp} x PP {training.pp}"
    if training.vpp > 1:
        layout += f", VPP {training.vpp}"
    if training.sequence_parallel:
        layout += ", sequence parallel"
    table.add_row("training", str(training.world_size), layout)
    engines = plan.rollout.engines
    table.add_row("rollout", str(sum(engine.tp for engine in engines)),
                  f"TP {plan.rollout.tp} x {len(engines)} engine{'s' if len(engines) > 1 else ''}")
    return table


def _stages(plan: Plan) -> Table:
    table = Table("pipeline stage", "ranks", "layers", box=SIMPLE_HEAD)
    for stage, chunks in enumerate(plan.training.layers_of_stage):
        ranks = [each.rank for each in plan.training.ranks if each.pp == stage]
        table.add_row(str(stage), ranges(ranks), ", ".join(map(ranges, chunks)))
    return table
