"""`megatron-rl plan`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from launch.cli import options

CLUSTER = ("--cluster", "--from-slurm", "--partition", "--nodelist", "--gpu")
MAIN = {
    "--diff": ("compares two plans that were written", ()),
    "--calibrate": ("refits a cluster file", ("--cluster",)),
    "--sweep": ("makes many plans", (*CLUSTER, "--json", "--target")),
    "--explain": ("prints an explanation", (*CLUSTER, "--out", "--html", "--trace", "--target", "--device"))}
"""Options that decide what the command does: what that is, and which others go with them. The first one given rules."""


@click.command()
@click.argument("words", nargs=-1, metavar="CONFIG [KEY=VALUE]...")
@options.device
@click.option("--cluster", "cluster_file", metavar="FILE", help="Plan for this cluster file, not the configuration's.")
@click.option("--from-slurm", is_flag=True, help="Plan for the nodes that Slurm has now (scontrol); a cluster file says "
                                                 "what Slurm does not know: NICs and rails.")
@click.option("--partition", help="With --from-slurm: only nodes of this partition.")
@click.option("--nodelist", metavar="LIST", help="With --from-slurm: only these nodes, such as node[001-032].")
@click.option("--gpu", metavar="KIND", help="With --from-slurm: only nodes with this kind of GPU.")
@click.option("--explain", is_flag=False, flag_value="", default=None, metavar="[KEY]",
              help="Every choice with its alternatives and every number with its formula and sources; of KEY only.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--out", metavar="FILE", help="Also write the plan as JSON to this file.")
@click.option("--html", metavar="FILE", help="Also write one self-contained page: map, memory, step, routes, choices.")
@click.option("--trace", metavar="FILE", help="Also write a Chrome trace of two steps (chrome://tracing, Perfetto).")
@click.option("--target", metavar="RATE", help="Prompts an hour to reach, such as 10000/h.")
@click.option("--sweep", metavar="nodes=A..B", help="Best plan of each cluster size: capacity curve, smallest that "
                                                    "reaches the target, GPU-hours per 1,000 prompts.")
@click.option("--diff", is_flag=True, help="Compare two plans: megatron-rl plan --diff A.json B.json.")
@click.option("--calibrate", metavar="RUN", help="Refit the coefficients of the cluster file (--cluster) to a run; further "
                                                   "runs, of other sizes, may follow.")
def command(words: tuple[str, ...], device: str, cluster_file: str | None, from_slurm: bool, partition: str | None,
            nodelist: str | None, gpu: str | None, explain: str | None, as_json: bool, out: str | None,
            html: str | None, trace: str | None, target: str | None, sweep: str | None, diff: bool,
            calibrate: str | None) -> None:
    """Which nodes train and which roll out, does it fit, how long is a step, and why.

    Keys that CONFIG pins are obeyed, those that are auto are searched. Everything printed is predicted.
    """
    _refuse_unused({"--diff": diff, "--calibrate": calibrate, "--sweep": sweep, "--cluster": cluster_file,
                    "--from-slurm": from_slurm, "--partition": partition, "--nodelist": nodelist, "--gpu": gpu,
                    "--explain": explain, "--json": as_json, "--out": out, "--html": html, "--trace": trace,
                    "--target": target, "--device": None if device == "auto" else device})
    if diff:
        return _diff(words)
    if calibrate is not None:
        return _calibrate(words, calibrate, cluster_file)
    if explain is not None and _is_config(explain) and (not words or "=" in words[0]):
        words, explain = (explain, *words), ""      # `--explain CONFIG`: the option took the configuration for its key
    config, overrides = _config_of(words)
    if target is not None:
        overrides = (*overrides, f"workload.target_prompts_per_hour={_rate(target)}")
    if cluster_file is not None and not from_slurm:
        overrides = (*overrides, f"cluster={cluster_file}")
    spec = _live(config, overrides, cluster_file, partition, nodelist, gpu) if from_slurm else None
    if sweep is not None:
        return _sweep(config, overrides, spec, sweep, as_json)

    from launch.planner.prepare import prepare
    prepared = prepare(config, overrides, device, cluster=spec)
    _write_files(prepared, out, html, trace)
    if as_json:
        click.echo(prepared.plan.model_dump_json(indent=2))
    elif explain is not None:
        from launch.report.plan.explain import explain as explained
        click.echo(explained(prepared.plan, explain))
    else:
        from launch.report.plan.table import print_plan
        print_plan(prepared, commands=_next(config, overrides, prepared, out))


def _refuse_unused(options: dict[str, object]) -> None:
    """An option that would be ignored is a mistake."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    main = next((name for name in MAIN if name in given), None)
    if main is not None:
        does, goes_with = MAIN[main]
        for name in given:
            if name != main and name not in goes_with:
                raise click.UsageError(f"{name} has no use with {main}, which {does}: give one of the two")
    for name in ("--partition", "--nodelist", "--gpu"):
        if name in given and "--from-slurm" not in given:
            raise click.UsageError(f"{name} chooses among the nodes that Slurm has: give --from-slurm with it")


def _is_config(word: str) -> bool:
    return word.endswith((".yaml", ".yml"))


def _config_of(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    if not words or "=" in words[0]:
        raise click.UsageError("name a configuration first: megatron-rl plan configs/70b/grpo.yaml [KEY=VALUE]...")
    return words[0], words[1:]


def _rate(text: str) -> float:
    from launch.errors import UserError

    number = text.removesuffix("/h").replace("_", "").replace(",", "")
    try:
        rate = float(number)
    except ValueError:
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise UserError(f"--target {text} is no rate", where="--target", fix="write prompts an hour, such as 10000/h")
    return rate


def _live(config: str, overrides: tuple[str, ...], cluster_file: str | None, partition: str | None,
          nodelist: str | None, gpu: str | None):
    from launch.cluster.file import load_cluster
    from launch.config.load import load_config
    from launch.slurm.client import Slurm
    from launch.slurm.live_cluster import read_cluster

    named = cluster_file or load_config(config, overrides).config.cluster
    base = None if named == "local" else load_cluster(named)
    return read_cluster(Slurm(), partition=partition, nodelist=nodelist, gpu=gpu, base=base, base_file=named)


def _write_files(prepared, out: str | None, html: str | None, trace: str | None) -> None:
    plan, planned = prepared.plan, prepared.planned
    if out is not None:
        _write(out, plan.model_dump_json(indent=2) + "\n", "--out")
    if html is not None:
        from launch.report.plan.html import write_html
        leaves = [switch.nodes for switch in planned.found.problem.cluster.switches if switch.nodes] if planned else ()
        write_html(plan, planned.seating if planned else None, html, leaves=leaves)
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


def _next(config: str, overrides: tuple[str, ...], prepared, out: str | None) -> list[str]:
    """The commands that follow from a plan."""
    words = " ".join((config, *overrides))
    commands = [f"megatron-rl plan {words} --explain", f"megatron-rl plan {words} --html plan.html"]
    if prepared.planned is None:
        return [*commands, f"megatron-rl launch {words} --on local"]
    if out is None:
        commands.append(f"megatron-rl plan {words} --out plan.json")
    return commands


def _diff(words: tuple[str, ...]) -> None:
    from launch.report.plan.diff import diff
    from launch.report.plan.file import load_plan

    if len(words) != 2:
        raise click.UsageError("--diff takes two plans: megatron-rl plan --diff A.json B.json")
    first, second = map(load_plan, words)
    click.echo(diff(first, second, names=(words[0], words[1])))


def _sweep(config: str, overrides: tuple[str, ...], spec, text: str, as_json: bool) -> None:
    from launch.config.load import load_config
    from launch.plan.plan import SCHEMA_VERSION
    from launch.planner.prepare import planning_inputs
    from launch.planner.sweep import parse, remarks, sweep
    from launch.report.plan.sweep import print_sweep

    first, last = parse(text)
    loaded = load_config(config, overrides)
    inputs = planning_inputs(loaded, spec)
    points = sweep(inputs, first, last)
    target = loaded.config.workload.target_prompts_per_hour
    said = remarks(inputs.cluster, len(points), first, last)
    if as_json:
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "target": target, "points": list(map(asdict, points)),
                               "remarks": said}, indent=2))
    else:
        print_sweep(points, target, remarks=said)


def _calibrate(words: tuple[str, ...], run: str, cluster_file: str | None) -> None:
    from launch.planner.calibrate.calibrate import calibrate
    from launch.report.run.measured import print_calibration

    if cluster_file is None:
        raise click.UsageError("--calibrate takes runs and a cluster file: megatron-rl plan --calibrate runs/NAME "
                               "[RUN]... --cluster configs/clusters/FILE.yaml")
    print_calibration(calibrate(Path(run), cluster_file, *map(Path, words)))
