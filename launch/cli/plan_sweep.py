"""`megatron-rl plan sweep`."""

from __future__ import annotations

import click

from launch.cli import options


@click.command(short_help="Plan for a range of cluster sizes.")
@options.config
@click.argument("words", nargs=-1, metavar="nodes=A..B [KEY=VALUE]...")
@options.planned_for
@options.as_json
def command(config: str, words: tuple[str, ...], planned_for: options.PlannedFor, as_json: bool) -> None:
    """Plan CONFIG for each cluster size from A to B nodes.

    Prints the capacity curve, the GPU-hours per 1,000 prompts, and the smallest cluster that reaches the target.
    Everything printed is predicted.
    """
    import json
    from dataclasses import asdict

    from launch.config.load import load_config
    from launch.plan.plan import SCHEMA_VERSION
    from launch.planner.prepare import posed
    from launch.planner.sweep import parse, remarks, sweep
    from launch.report.plan.sweep import print_sweep

    sizes = [word for word in words if word.startswith("nodes=") or "=" not in word]
    if len(sizes) != 1:
        raise click.UsageError("give a range of sizes: megatron-rl plan sweep CONFIG nodes=8..64")
    first, last = parse(sizes[0])
    overrides = (*(word for word in words if word not in sizes), *planned_for.overrides())
    problem = posed(load_config(config, overrides), planned_for.spec(config, overrides), largest=last)
    points, target = sweep(problem, first, last), problem.workload.target
    said = remarks(problem.cluster, len(points), first, last)
    if as_json:
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "target": target, "points": list(map(asdict, points)),
                               "remarks": said}, indent=2))
    else:
        print_sweep(points, target, remarks=said)
