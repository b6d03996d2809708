"""`megatron-rl plan explain`."""

from __future__ import annotations

import click

from launch.cli import options


@click.command(short_help="Explain the choices and numbers of a plan.")
@options.config
@click.argument("words", nargs=-1, metavar="[NAME]... [KEY=VALUE]...")
@options.device
@options.planned_for
def command(config: str, words: tuple[str, ...], device: options.Device, planned_for: options.PlannedFor) -> None:
    """Explain the plan of CONFIG: every choice with its alternatives, every number with its formula and sources.

    NAME is a number or choice of the plan (step.total_s, split), or a prefix of several (memory.training). With NAME,
    only these are explained, and each number is traced back to its inputs. Everything printed is predicted.
    """
    from launch.planner.prepare import prepare
    from launch.report.plan.explain import explain

    names = [word for word in words if "=" not in word]
    overrides = (*(word for word in words if "=" in word), *planned_for.overrides())
    plan = prepare(config, overrides, device, cluster=planned_for.spec(config, overrides)).plan
    click.echo("\n\n".join(explain(plan, name) for name in names or [""]))
