"""A plan as one HTML file without network access or scripts, for light and dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from launch.errors import UserError
from launch.model.architecture import parameter_count
from launch.plan.forecast import Forecast, Number
from launch.plan.plan import ForecastPlan, Placement, Plan
from launch.planner.seats.cluster import Seating
from launch.report.plan import map as plan_map
from launch.report.plan import routes as plan_routes
from launch.report.plan import svg as plan_svg
from launch.report.plan.explain import rejected
from launch.report.plan.overview import layout, role_gpus, role_nodes, worst
from launch.report.quantities import both, gigabytes, human, plural, seconds, significant
from launch.report.run.html import CSS

STYLE = (
    CSS
    + """
.facts { grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); }
.note { margin: 10px 0 0; color: var(--soft); font-size: 13px; }
h3 { font-size: 15px; margin: 0 0 10px; } .card + .card { margin-top: 12px; }
.charts .card + .card, .facts .card + .card { margin-top: 0; }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; } ul { margin: 0; padding-left: 18px; }
.good { color: #16a34a; } .doubtful { color: #d97706; } .bad { color: #dc2626; } .scroll { overflow-x: auto; }
td:first-child code { white-space: nowrap; } td p { margin: 0 0 4px; } .gpu:hover, .edge:hover { opacity: 0.75; }
"""
)
VERDICTS = {"reached": "good", "within its uncertainty": "doubtful", "missed": "bad", "no target": "", "fits": "good",
            "tight": "doubtful", "no": "bad"}


def write_html(plan: Plan, placement: Placement | Seating | None, path: str | Path, *,
               leaves: Sequence[Sequence[str]] = ()) -> Path:
    """Write the page and return its path. Without a placement, the map of nodes and GPUs is omitted.

    Args:
        leaves: names of the nodes under each leaf switch, for the map; () if there is one leaf.

    Raises:
        UserError: the plan has no forecast, or the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_text(render(plan, placement, leaves), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", where=f"--html {path.absolute()}",
                        fix="give a file in an existing, writable folder") from error
    return path


def render(plan: Plan, placement: Placement | Seating | None, leaves: Sequence[Sequence[str]] = ()) -> str:
    """The whole page as text. Equal plans and placements give equal bytes."""
    if not isinstance(plan, ForecastPlan):
        raise UserError("this plan has no forecast, so there is nothing to draw", where="plan: forecast",
                        fix="plan for a cluster: megatron-rl plan CONFIG --cluster FILE")
    forecast = plan.forecast
    title = f"Plan {plan.fingerprint()} on {forecast.cluster.name}"
    body = [
        _head(plan, title),
        _facts(plan),
        _warnings(forecast),
        _map(plan, placement, leaves),
        f'<h2>The step</h2><div class="card">{plan_svg.step(forecast)}<p class="note">Two steps of the steady state, '
        f"predicted: {escape(_step_words(forecast))}</p></div>",
        _memory_and_front(forecast),
        _sync(forecast),
        _choices(forecast),
        _numbers(forecast),
    ]
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n")


def _head(plan: ForecastPlan, title: str) -> str:
    forecast, model, batch = plan.forecast, plan.architecture, plan.batch
    cluster = forecast.cluster
    mode = f"{forecast.split.mode}, {'asynchronous' if forecast.asynchronous else 'synchronous'}"
    return (
        f'<h1>{escape(title)}</h1><div class="soft">{escape(mode)}; {escape(model.family)}, '
        f"{parameter_count(model):,} parameters, {model.layers} layers; a step is {batch.prompts_per_step} prompts x "
        f"{batch.group_size} completions; {plural(cluster.nodes, 'node')} x {cluster.gpus_per_node} "
        f"{escape(cluster.gpu)} ({escape(cluster.source)}). Every figure on this page is predicted: no run of this "
        "plan has been measured.</div>"
    )


def _facts(plan: ForecastPlan) -> str:
    forecast = plan.forecast
    rate, it, split = forecast.throughput, forecast.reliability, forecast.split
    heaviest, stale = worst(forecast.memory), forecast.staleness
    goal = "no target" if rate.target is None else f"target {human(rate.target)}: {rate.verdict}"
    facts = [(f"{rate.nominal:,.0f} prompts/h", f"{rate.low:,.0f} to {rate.high:,.0f}; {goal}",
              VERDICTS[rate.verdict]),
             (f"{seconds(forecast.step_s)} per step",
              f"{seconds(forecast.step_low_s)} to {seconds(forecast.step_high_s)}", "")]
    for role in ("training", "rollout"):
        facts.append((f"{plural(role_nodes(forecast, role), 'node')}, {role_gpus(plan, role):,} GPUs",
                      f"{role}: {layout(plan, role)}", ""))
    if split.spare:
        facts.append((plural(split.spare, "spare node"), "not used: a reserve, or more than the layouts need", ""))
    if heaviest is not None:
        facts.append((f"{gigabytes(heaviest.total)} of {gigabytes(heaviest.limit)} GB",
                      f"fullest GPU: {heaviest.role}, {heaviest.name}; {heaviest.verdict}",
                      VERDICTS[heaviest.verdict]))
    mean = f"at most; mean {significant(stale.mean, 2)}" if forecast.asynchronous else "the step is synchronous"
    facts += [(plural(stale.versions, "version"), f"staleness, {mean}", ""),
              (f"{seconds(_expected(forecast))} sync",
               f"{forecast.sync.chosen}, {human(forecast.sync.payload_bytes, 'bytes')} per copy", ""),
              (f"{it.effective_time_ratio:.1%} progress", f"a failure every {significant(it.job_mtbf_hours)} h; "
               f"checkpoint every {plural(it.checkpoint_every_steps, 'step')}", "")]
    cards = "".join(f'<div class="card fact"><b class="{kind}">{escape(value)}</b><span>{escape(what)}</span></div>'
                    for value, what, kind in facts)
    return (f'<div class="facts">{cards}</div><div class="card" style="margin-top:12px"><b>Bottleneck</b> '
            f"{escape(forecast.bottleneck)}</div>")


def _expected(forecast: Forecast) -> float:
    return next((each.expected_s for each in forecast.sync.routes if each.route == forecast.sync.chosen), 0.0)


def _warnings(forecast: Forecast) -> str:
    if not forecast.warnings:
        return ""
    cards = "".join(f'<div class="card warning"><b>{escape(each.code)}</b> {escape(each.message)}</div>'
                    for each in forecast.warnings)
    return f"<h2>Warnings</h2>{cards}"


def _map(plan: ForecastPlan, placement: Placement | Seating | None, leaves: Sequence[Sequence[str]]) -> str:
    if placement is None:
        return ""
    cluster = plan.forecast.cluster
    rails = (f"NIC r of every node is on rail r ({cluster.rails} rails)" if cluster.rails > 1
             else "all NICs share one fabric")
    return (
        f'<h2>Nodes and GPUs</h2><div class="card">{plan_map.draw(plan, placement, leaves)}'
        '<p class="note">A square is a GPU: '
        f"its training rank or its engine. Hover for coordinates. {escape(rails)}.</p></div>"
    )


def _step_words(forecast: Forecast) -> str:
    overlap = ("rollout and training run at the same time, on samples of different versions" if forecast.asynchronous
               else "each phase waits for the previous one")
    return f"{overlap}; grey is idle, the thin line spans low to high."


def _memory_and_front(forecast: Forecast) -> str:
    front = f'<div class="card"><h3>Alternatives: the effect of more nodes</h3>{plan_svg.pareto(forecast)}</div>'
    return (f'<h2>Memory and capacity</h2><div class="charts"><div class="card"><h3>Memory of a GPU (the line is the '
            f"limit)</h3>{plan_svg.memory(forecast.memory)}</div>{front}</div>")


def _sync(forecast: Forecast) -> str:
    sync = forecast.sync
    if not sync.routes:
        return ""
    rows = "".join(
        f"<tr><td>{escape(r.route)}{' (chosen)' if r.route == sync.chosen else ''}</td>"
        f'<td class="n">{seconds(r.lower_bound_s)}</td><td class="n">{seconds(r.expected_s)}</td>'
        f'<td class="n">{human(r.busiest_nic_out_bytes, "bytes")}</td>'
        f'<td class="n">{human(r.busiest_nic_in_bytes, "bytes")}</td>'
        f'<td class="n">{r.hops}</td></tr>'
        for r in sync.routes
    )
    order = (
        f"GPU order of an engine: {', '.join(map(str, sync.gpu_order))}. "
        f"{human(sync.cross_rail_bytes, 'bytes')} cross "
        f"rails ({human(sync.cross_rail_bytes_natural, 'bytes')} in natural order)."
        if sync.gpu_order
        else ""
    )
    panels = "".join(f'<div class="card"><h3>{escape(r.route)}{", chosen" if r.route == sync.chosen else ""}</h3>'
                     f"{plan_routes.route(forecast, r)}</div>"
                     for r in sorted(sync.routes, key=lambda each: each.route != sync.chosen) if r.edges)
    return (
        f'<h2>Weight sync</h2><div class="card"><p style="margin-top:0">'
        f'{escape(sync.chosen)}: {escape(sync.reason)}</p>'
        f'{plan_routes.times(sync)}<table><tr><th>route</th><th class="n">at least</th><th class="n">expected</th>'
        f'<th class="n">busiest NIC, out</th><th class="n">busiest NIC, in</th><th class="n">hops</th></tr>'
        f"{rows}</table>"
        f'<p class="note">{escape(order)}</p></div>{panels}'
    )


def _choices(forecast: Forecast) -> str:
    if not forecast.choices:
        return ""
    rows = []
    for choice in forecast.choices:
        others = "".join(f"<li>{escape(rejected(each))}</li>" for each in choice.alternatives)
        rows.append(f"<tr><td><code>{escape(choice.key)}</code></td><td><p><b>{escape(choice.value)}</b></p>"
                    f"{escape(choice.reason)}</td><td>{f'<ul>{others}</ul>' if others else ''}</td></tr>")
    return (
        '<h2>Choices</h2><div class="card scroll"><table><tr><th>key</th><th>chosen, and why</th>'
        '<th>rejected, and by what'
        f"</th></tr>{''.join(rows)}</table></div>"
    )


def _numbers(forecast: Forecast) -> str:
    groups: dict[str, list[Number]] = {}
    for each in forecast.numbers:
        groups.setdefault(each.key.split(".")[0], []).append(each)
    blocks = "".join(
        f'<details class="card"><summary>{escape(name)} <span class="soft">({plural(len(members), "number")})</span>'
        f"</summary>{_table(members)}</details>"
        for name, members in groups.items()
    )
    return f"<h2>Where each number comes from</h2>{blocks}" if blocks else ""


def _table(numbers: Iterable[Number]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(each.key)}</code></td><td>{escape(both(each.value, each.unit))}</td>"
        f"<td>{escape(each.formula or each.source)}</td>"
        f"<td>{', '.join(f'<code>{escape(key)}</code>' for key in each.inputs)}</td></tr>" for each in numbers)
    return ('<div class="scroll"><table><tr><th>key</th><th>value</th><th>formula or source</th><th>inputs</th></tr>'
            f"{rows}</table></div>")
