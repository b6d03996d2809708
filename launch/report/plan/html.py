"""A plan as an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from launch.model.architecture import parameter_count
from launch.plan.forecast import Forecast, Number
from launch.plan.plan import ForecastPlan, Placement, Plan
from launch.planner.seats.cluster import Seating
from launch.report.html import CSS, NUMBER, TEXT, facts, page, table
from launch.report.plan import map as plan_map
from launch.report.plan import routes as plan_routes
from launch.report.plan import svg as plan_svg
from launch.report.plan.explain import rejected
from launch.report.plan.file import with_forecast
from launch.report.plan.overview import layout, role_gpus, role_nodes, worst
from launch.report.quantities import both, gigabytes, human, plural, seconds, significant

STYLE = """
.facts { grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); }
.note { margin: 10px 0 0; color: var(--soft); font-size: 13px; }
h3 { font-size: 15px; margin: 0 0 10px; } .card + .card { margin-top: 12px; }
.charts .card + .card, .facts .card + .card { margin-top: 0; }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; } ul { margin: 0; padding-left: 18px; }
.good { color: #16a34a; } .doubtful { color: #d97706; } .bad { color: #dc2626; } .scroll { overflow-x: auto; }
td:first-child code { white-space: nowrap; } td p { margin: 0 0 4px; } .gpu:hover, .edge:hover { opacity: 0.75; }
"""
"""Added to the common style sheet."""
VERDICTS = {"reached": "good", "within its uncertainty": "doubtful", "missed": "bad", "no target": "", "fits": "good",
            "tight": "doubtful", "no": "bad"}


def render(plan: Plan, placement: Placement | Seating | None, leaves: Sequence[Sequence[str]] = ()) -> str:
    """The whole page as text, without the map of nodes and GPUs if there is no placement. Equal plans and placements
    give equal bytes.

    Args:
        leaves: names of the nodes under each leaf switch, for the map; () if there is one leaf.

    Raises:
        UserError: the plan has no forecast.
    """
    plan = with_forecast(plan, "there is nothing to draw")
    forecast = plan.forecast
    title = f"Plan {plan.fingerprint()} on {forecast.cluster.name}"
    body = [
        _head(plan, title),
        _facts(plan),
        _warnings(forecast),
        _map(plan, placement, leaves),
        _step(forecast),
        _memory_and_front(forecast),
        _sync(forecast),
        _choices(forecast),
        _numbers(forecast),
    ]
    return page(title, body, CSS + STYLE)


def _head(plan: ForecastPlan, title: str) -> str:
    forecast, model, batch = plan.forecast, plan.architecture, plan.batch
    cluster = forecast.cluster
    mode = f"{forecast.split.mode}, {'asynchronous' if forecast.asynchronous else 'synchronous'}"
    return (f'<h1>{escape(title)}</h1><div class="soft">{escape(mode)}; {escape(model.family)}, '
            f"{parameter_count(model):,} parameters, {model.layers} layers; a step is {batch.prompts_per_step} prompts "
            f"x {batch.group_size} completions; {plural(cluster.nodes, 'node')} x {cluster.gpus_per_node} "
            f"{escape(cluster.gpu)} ({escape(cluster.source)}). Every figure on this page is predicted: no run of this "
            "plan has been measured.</div>")


def _facts(plan: ForecastPlan) -> str:
    forecast = plan.forecast
    rate, it, split = forecast.throughput, forecast.reliability, forecast.split
    heaviest, stale = worst(forecast.memory), forecast.staleness
    goal = "no target" if rate.target is None else f"target {human(rate.target)}: {rate.verdict}"
    rows = [(f"{rate.nominal:,.0f} prompts/h", f"{rate.low:,.0f} to {rate.high:,.0f}; {goal}",
             VERDICTS[rate.verdict]),
            (f"{seconds(forecast.step_s)} per step",
             f"{seconds(forecast.step_low_s)} to {seconds(forecast.step_high_s)}", "")]
    for role in ("training", "rollout"):
        rows.append((f"{plural(role_nodes(forecast, role), 'node')}, {role_gpus(plan, role):,} GPUs",
                     f"{role}: {layout(plan, role)}", ""))
    if split.spare:
        rows.append((plural(split.spare, "spare node"), "not used: a reserve, or more than the layouts need", ""))
    if heaviest is not None:
        rows.append((f"{gigabytes(heaviest.total)} of {gigabytes(heaviest.limit)} GB",
                     f"fullest GPU: {heaviest.role}, {heaviest.name}; {heaviest.verdict}",
                     VERDICTS[heaviest.verdict]))
    mean = f"at most; mean {significant(stale.mean, 2)}" if forecast.asynchronous else "the step is synchronous"
    sync = forecast.sync
    expected_s = next((each.expected_s for each in sync.routes if each.route == sync.chosen), 0.0)
    rows += [(plural(stale.versions, "version"), f"staleness, {mean}", ""),
             (f"{seconds(expected_s)} sync", f"{sync.chosen}, {human(sync.payload_bytes, 'bytes')} per copy", ""),
             (f"{it.effective_time_ratio:.1%} progress", f"a failure every {significant(it.job_mtbf_hours)} h; "
              f"checkpoint every {plural(it.checkpoint_every_steps, 'step')}", "")]
    return (f'{facts(rows)}<div class="card" style="margin-top:12px"><b>Bottleneck</b> '
            f"{escape(forecast.bottleneck)}</div>")


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
    return (f'<h2>Nodes and GPUs</h2><div class="card">{plan_map.draw(plan, placement, leaves)}'
            '<p class="note">A square is a GPU: its training rank or its engine. Hover for coordinates. '
            f"{escape(rails)}.</p></div>")


def _step(forecast: Forecast) -> str:
    phases = {phase.name: phase for phase in forecast.phases}
    early = "rollout" in phases and "train" in phases and phases["train"].starts < phases["rollout"].seconds
    overlap = ("rollout and training run at the same time, on samples of different versions" if forecast.asynchronous
               else "the trainer works on complete groups while others of the same batch are generated" if early
               else "each phase waits for the previous one")
    return (f'<h2>The step</h2><div class="card">{plan_svg.step(forecast)}<p class="note">Two steps of the steady '
            f"state, predicted: {overlap}; grey is idle, the thin line spans low to high.</p></div>")


def _memory_and_front(forecast: Forecast) -> str:
    return ('<h2>Memory and capacity</h2><div class="charts"><div class="card"><h3>Memory of a GPU (the line is the '
            f'limit)</h3>{plan_svg.memory(forecast.memory)}</div><div class="card"><h3>Alternatives: the effect of '
            f"more nodes</h3>{plan_svg.pareto(forecast)}</div></div>")


def _sync(forecast: Forecast) -> str:
    sync = forecast.sync
    if not sync.routes:
        return ""
    routes = table(
        {"route": TEXT, "at least": NUMBER, "expected": NUMBER, "busiest NIC, out": NUMBER, "busiest NIC, in": NUMBER,
         "hops": NUMBER},
        ((escape(r.route) + (" (chosen)" if r.route == sync.chosen else ""), seconds(r.lower_bound_s),
          seconds(r.expected_s), human(r.busiest_nic_out_bytes, "bytes"), human(r.busiest_nic_in_bytes, "bytes"),
          f"{r.hops}") for r in sync.routes))
    order = "" if not sync.gpu_order else (
        f"GPU order of an engine: {', '.join(map(str, sync.gpu_order))}. {human(sync.cross_rail_bytes, 'bytes')} cross "
        f"rails ({human(sync.cross_rail_bytes_natural, 'bytes')} in natural order).")
    panels = "".join(f'<div class="card"><h3>{escape(r.route)}{", chosen" if r.route == sync.chosen else ""}</h3>'
                     f"{plan_routes.route(forecast, r)}</div>"
                     for r in sorted(sync.routes, key=lambda each: each.route != sync.chosen) if r.edges)
    return (f'<h2>Weight sync</h2><div class="card"><p style="margin-top:0">{escape(sync.chosen)}: '
            f"{escape(sync.reason)}</p>{plan_routes.times(sync)}{routes}"
            f'<p class="note">{escape(order)}</p></div>{panels}')


def _choices(forecast: Forecast) -> str:
    if not forecast.choices:
        return ""
    rows = []
    for choice in forecast.choices:
        others = "".join(f"<li>{escape(rejected(each))}</li>" for each in choice.alternatives)
        rows.append((f"<code>{escape(choice.key)}</code>",
                     f"<p><b>{escape(choice.value)}</b></p>{escape(choice.reason)}",
                     f"<ul>{others}</ul>" if others else ""))
    columns = {"key": TEXT, "chosen, and why": TEXT, "rejected, and by what": TEXT}
    return f'<h2>Choices</h2><div class="card scroll">{table(columns, rows)}</div>'


def _numbers(forecast: Forecast) -> str:
    groups: dict[str, list[Number]] = {}
    for each in forecast.numbers:
        groups.setdefault(each.key.split(".")[0], []).append(each)
    blocks = "".join(
        f'<details class="card"><summary>{escape(name)} <span class="soft">({plural(len(members), "number")})</span>'
        f'</summary><div class="scroll">{_table(members)}</div></details>'
        for name, members in groups.items()
    )
    return f"<h2>Where each number comes from</h2>{blocks}" if blocks else ""


def _table(numbers: Iterable[Number]) -> str:
    return table({"key": TEXT, "value": TEXT, "formula or source": TEXT, "inputs": TEXT},
                 ((f"<code>{escape(each.key)}</code>", escape(both(each.value, each.unit)),
                   escape(each.formula or each.source),
                   ", ".join(f"<code>{escape(key)}</code>" for key in each.inputs)) for each in numbers))
