"""`megatron-rl plan`, and the old spellings of its verbs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launch.cli import options, plan_accuracy, plan_calibrate, plan_diff, plan_explain, plan_sweep
from launch.cli.verbs import CommandWithVerbs

if TYPE_CHECKING:
    from launch.planner.prepare import Prepared

VERBS = {"accuracy": plan_accuracy.command, "calibrate": plan_calibrate.command, "diff": plan_diff.command,
         "explain": plan_explain.command, "sweep": plan_sweep.command}


class PlanCommand(CommandWithVerbs):
    """Answers an option that became a verb with the new command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for verb in VERBS:
            for at, word in enumerate(args):
                if word == f"--{verb}" or word.startswith(f"--{verb}="):
                    words = shlex.join(_without_option(verb, args, at))
                    raise click.UsageError(f"--{verb} is now a command: {ctx.command_path} {verb} {words}",
                                           ctx)
        return super().parse_args(ctx, args)


def _without_option(verb: str, args: list[str], at: int) -> list[str]:
    """`CONFIG --explain KEY` -> `CONFIG KEY`; in `--explain KEY CONFIG` the configuration follows the key."""
    _, equals, value = args[at].partition("=")
    before, values, after = args[:at], [value] if equals else [], args[at + 1:]
    if verb == "explain" and not equals and after and not after[0].startswith("-"):
        values, after = after[:1], after[1:]
    if verb == "explain" and values and not values[0].endswith((".yaml", ".yml")):
        return [*before, *after, *values]
    return [*before, *values, *after]


@click.command(cls=PlanCommand, commands=VERBS, invoke_without_command=True)
@options.config_and_overrides
@options.device
@options.planned_for
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--out", metavar="FILE", help="Also write the plan as JSON to this file.")
@click.option("--html", metavar="FILE", help="Also write a self-contained page: map, memory, step, routes, choices.")
@click.option("--trace", metavar="FILE", help="Also write a Chrome trace of two steps (chrome://tracing, Perfetto).")
def command(config: str, overrides: tuple[str, ...], device: options.Device, planned_for: options.PlannedFor,
            as_json: bool, out: str | None, html: str | None, trace: str | None) -> None:
    """Plan CONFIG: which nodes train and which generate, whether it fits, how long a step takes, and why.

    Keys that CONFIG sets are kept; keys set to auto are searched. Everything printed is predicted.
    """
    from launch.planner.prepare import prepare
    from launch.report.plan.table import print_plan

    overrides = (*overrides, *planned_for.overrides())
    prepared = prepare(config, overrides, device, cluster=planned_for.spec(config, overrides))
    _write_files(prepared, out, html, trace)
    if as_json:
        click.echo(prepared.plan.model_dump_json(indent=2))
    else:
        print_plan(prepared, commands=_next(config, overrides, prepared, out))


def _write_files(prepared: Prepared, out: str | None, html: str | None, trace: str | None) -> None:
    from launch.planner.prepare import OnCluster

    plan = prepared.plan
    if out is not None:
        _write(out, plan.model_dump_json(indent=2) + "\n", "--out")
    if html is not None:
        from launch.report.plan.html import render
        seating = prepared.seating if isinstance(prepared, OnCluster) else None
        switches = prepared.cluster.switches if isinstance(prepared, OnCluster) else ()
        _write(html, render(plan, seating, [switch.nodes for switch in switches if switch.nodes]), "--html")
    if trace is not None:
        from launch.report.plan.trace import trace as traced
        _write(trace, json.dumps(traced(plan)) + "\n", "--trace")


def _write(path: str, text: str, option: str) -> None:
    from launch.errors import UserError

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", where=f"{option} {Path(path).absolute()}",
                        fix="give a file in an existing, writable folder") from error


def _next(config: str, overrides: tuple[str, ...], prepared: Prepared, out: str | None) -> list[str]:
    """Commands to run next."""
    from launch.planner.prepare import OnCluster

    words = shlex.join((config, *overrides))
    commands = [f"megatron-rl plan explain {words}", f"megatron-rl plan {words} --html plan.html"]
    if not isinstance(prepared, OnCluster):
        return [*commands, f"megatron-rl launch {words} --on local"]
    if out is None:
        commands.append(f"megatron-rl plan {words} --out plan.json")
    return commands
