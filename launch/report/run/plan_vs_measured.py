"""Plan against measurements, for the end of a run and its report; and the changes made by a calibration."""

from __future__ import annotations

import json
import textwrap
from html import escape
from pathlib import Path

import click

from launch.plan.plan import forecast_of, read_plan
from launch.planner.calibrate.calibrate import Calibration
from launch.planner.calibrate.measured import PlanVsMeasured, compare
from launch.report.html import NUMBER, TEXT, table
from launch.report.lines import LABEL, WIDTH, field
from launch.report.quantities import seconds, significant
from launch.run.metrics import metric_rows

FILE = "plan-vs-measured.json"


def of_attempt(attempt: Path) -> PlanVsMeasured | None:
    """The comparison of an attempt, from its folder; None if the folder has no plan that this version can read."""
    try:
        plan = read_plan(json.loads((attempt / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):       # not JSON, or not a plan
        return None
    return compare(forecast_of(plan), metric_rows(attempt / "metrics.jsonl"), plan.no_forecast)


def comparison_text(found: PlanVsMeasured) -> str:
    """A few lines for the end of a run."""
    if found.steps is None:
        return field("plan", f"not compared with measurements: {found.nothing}")
    measured = f"median of steps {found.steps.first} to {found.steps.last}"
    lines = [f"{'plan':{LABEL}}predicted before the run, measured in it ({measured})",
             f"{'':{LABEL}}{'':10}{'predicted':>12}{'range':>22}{'measured':>12}{'measured/predicted':>21}"]
    for each in found.phases:
        ends = f"{seconds(each.predicted.low)} to {seconds(each.predicted.high)}"
        lines.append(f"{'':{LABEL}}{each.name:10}{seconds(each.predicted.seconds):>12}{ends:>22}"
                     f"{seconds(each.measured.median):>12}{_ratio(each.ratio):>10}"
                     f"{'' if each.in_range else ', not in range'}")
    lines += [f"{'':{LABEL}}{f'tokens per {each.name}':22}{significant(each.assumed, 4)} assumed, "
              f"{significant(each.measured, 4)} measured" for each in found.lengths]
    return "\n".join([*lines, *(field("", note) for note in found.notes)])


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else significant(ratio)


def comparison_html(found: PlanVsMeasured | None) -> str:
    """The section in a run's report."""
    if found is None:
        return ""
    head = "<h2>Predicted and measured</h2>"
    if found.steps is None:
        return f'{head}<p class="soft">Not compared: {escape(found.nothing or "")}.</p>'
    phases = table(
        {"phase": TEXT, "predicted": NUMBER, "predicted range": NUMBER, "measured median": NUMBER,
         "measured, all steps": NUMBER, "measured / predicted": NUMBER, "in the range": TEXT},
        ((escape(each.name), seconds(each.predicted.seconds),
          f"{seconds(each.predicted.low)} to {seconds(each.predicted.high)}", seconds(each.measured.median),
          f"{seconds(each.measured.lowest)} to {seconds(each.measured.highest)}", _ratio(each.ratio),
          "yes" if each.in_range else "no") for each in found.phases))
    lengths = table(
        {"length": TEXT, "assumed": NUMBER, "measured mean": NUMBER, "measured / assumed": NUMBER},
        ((f"tokens per {escape(each.name)}", significant(each.assumed, 4), significant(each.measured, 4),
          significant(each.ratio)) for each in found.lengths))
    notes = "".join(f"<p>{escape(note)}</p>" for note in found.notes)
    return (f'{head}<div class="card"><p class="soft">Predicted: by the plan, before the run. Measured: steps '
            f"{found.steps.first} to {found.steps.last}, without {found.steps.left_out} warm-up steps.</p>"
            f"{phases}{lengths}{notes}</div>")


def print_calibration(found: Calibration) -> None:
    """Print the measurements, the predictions for the same runs before and after, and the changed coefficients."""
    for run in found.runs:
        click.echo(f"{run.name}: {run.steps} steps, prompts of {significant(run.prompt_tokens, 4)} and responses of "
                   f"{significant(run.response_tokens, 4)} tokens (measured, and used in the predictions below)")
    several = len(found.runs) > 1
    width = max((len(run.name) for run in found.runs), default=0) + 2 if several else 0
    click.echo(f"\n{'phase':10}{'run' if several else '':{width}}{'measured':>12}{'predicted before':>19}"
               f"{'predicted now':>16}")
    for phase in found.phases:
        for each in phase.runs:
            click.echo(f"{phase.phase:10}{each.run if several else '':{width}}{seconds(each.measured):>12}"
                       f"{seconds(each.before):>19}{seconds(each.after):>16}")
    keys = [change.key for phase in found.phases for change in phase.changes]
    if keys:
        width = max(map(len, keys)) + 2
        click.echo(f"\n{'coefficient':{width}}{'old':>12}{'new':>12}")
    for phase in found.phases:
        for change in phase.changes:
            click.echo(f"{change.key:{width}}{change.old:>12.4g}{change.new:>12.4g}")
    for phase in found.phases:
        if phase.note:
            click.echo("\n".join(textwrap.wrap(f"{phase.phase}: {phase.note}", WIDTH, subsequent_indent="  ")))
    click.echo(f"written to {found.cluster_file}" if keys else f"{found.cluster_file} is unchanged")
