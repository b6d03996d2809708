"""A plan with its forecast on a terminal, at most 100 columns wide: placement, memory, step time, bottleneck, and
commands to run next."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.model.architecture import parameter_count
from launch.plan.forecast import Forecast, MemoryOf
from launch.plan.plan import ForecastPlan, Plan
from launch.report.plan import bars as plan_bars
from launch.report.quantities import gigabytes, human, plain, plural, seconds, significant

WIDTH = 100
NARROW = 96
"""Below this many columns the bars shrink, and lines of numbers lose their less important half."""
VERDICT_STYLES = {"fits": "green", "tight": "yellow", "no": "bold red", "reached": "green",
                  "within its uncertainty": "yellow", "missed": "bold red", "no target": ""}
PHASE_STYLES = {"rollout": "cyan", "reward": "yellow", "logprob": "magenta", "reference": "magenta",
                "teacher": "magenta", "train": "green", "sync": "blue"}
ROLE_STYLES = {"training": "green", "rollout": "cyan"}
LABEL = 13
"""Width of the labels at the left."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def terminal() -> Console:
    """Standard output, at most `WIDTH` columns wide. A pipe gets the full width."""
    probe = Console(highlight=False)
    return Console(width=min(WIDTH, probe.width) if probe.is_terminal else WIDTH, highlight=False)


def print_overview(plan: ForecastPlan, config: str, console: Console, *, commands: Sequence[str] = ()) -> None:
    """Print a plan that has a forecast. Lines fit into the console's width and `WIDTH`, except for commands.

    Args:
        config: the configuration's path, for the heading.
        commands: commands to run next, one per line.
    """
    forecast, width = plan.forecast, min(WIDTH, console.width)
    marks = plan_bars.marks(console.encoding)
    _header(plan, config, console)
    console.print(_roles(plan, width, marks))
    _components(forecast, console)
    _step(forecast, console, width, marks)
    _throughput(forecast, console, width, marks)
    _rollout(forecast, console)
    _rewards(forecast, console)
    _sync(forecast, console, width)
    _reliability(forecast, console)
    _warnings(forecast, console)
    if commands:
        console.print(Text("next", "bold"))
        for command in commands:
            console.print(Text("  " + plain(command)), soft_wrap=True)   # commands are copied, so they are not wrapped


def worst(memory: Iterable[MemoryOf]) -> MemoryOf | None:
    """The row closest to its limit; None if there are no rows."""
    return max(memory, key=lambda each: each.total / (each.limit or 1), default=None)


def layout(plan: Plan, role: str) -> str:
    """`TP4 CP2 DP5 PP4 VPP5`, `12 engines of TP8`."""
    if role == "rollout":
        return f"{plural(len(plan.rollout.engines), 'engine')} of TP{plan.rollout.tp}"
    training = plan.training
    numbers = plan.forecast.numbers if isinstance(plan, ForecastPlan) else ()
    ep = next((f" EP{int(each.value)}" for each in numbers if each.key == "trainer.ep" and each.value > 1), "")
    return (f"TP{training.tp}{ep} CP{training.cp} DP{training.dp} PP{training.pp}"
            + (f" VPP{training.vpp}" if training.vpp > 1 else ""))


def role_nodes(forecast: Forecast, role: str) -> int:
    """Number of nodes that a role runs on. Colocated and hybrid plans share all nodes."""
    split = forecast.split
    if role == "training":
        return split.training
    return split.rollout if split.mode == "disaggregated" else split.training + split.rollout


def role_gpus(plan: Plan, role: str) -> int:
    if role == "training":
        return plan.training.world_size
    return sum(engine.tp for engine in plan.rollout.engines)


def _header(plan: ForecastPlan, config: str, console: Console) -> None:
    forecast, model, batch = plan.forecast, plan.architecture, plan.batch
    cluster = forecast.cluster
    _line(console, "plan", f"{plain(config)}: {forecast.split.mode}, "
          f"{'asynchronous' if forecast.asynchronous else 'synchronous'} ({plan.fingerprint()})", body="bold")
    _line(console, "model", f"{model.family}, {parameter_count(model):,} parameters, {model.layers} layers; a step is "
          f"{batch.prompts_per_step} prompts x {batch.group_size} completions = {batch.samples_per_step} sequences")
    if plan.teacher:
        teacher = plan.teacher.architecture
        _line(console, "teacher", f"{teacher.family}, {parameter_count(teacher):,} parameters, {teacher.layers} "
                                  "layers; frozen, on the training ranks")
    network = (f", {plural(cluster.nics_per_node, 'NIC')} of {human(cluster.nic_bandwidth, 'bytes/s')} a node, "
               f"{plural(cluster.rails, 'rail')}" if cluster.nodes > 1 and cluster.nics_per_node else "")
    _line(console, "cluster", f"{plain(cluster.name)}: {plural(cluster.nodes, 'node')} x {cluster.gpus_per_node} "
                              f"{plain(cluster.gpu)}{network} ({plain(cluster.source)})")
    _line(console, "", "Every figure is predicted: no run of this plan has been measured.", body="dim")
    console.print()


def _roles(plan: ForecastPlan, width: int, marks: plan_bars.Marks) -> Table:
    """One row per role, with the worst stage and both ends of the pipeline under it."""
    forecast, wide = plan.forecast, width >= NARROW
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), header_style="bold")
    for title in ("role", "nodes", "GPUs", "parallelism", "GPU of", "memory", "used/limit", "verdict"):
        number = title in ("nodes", "GPUs", "used/limit")
        table.add_column(title, justify="right" if number else "left", no_wrap=title != "parallelism")
    for role in ("training", "rollout"):
        rows = _shown([each for each in forecast.memory if each.role == role])
        first = [Text(role, ROLE_STYLES[role]), f"{role_nodes(forecast, role)}", f"{role_gpus(plan, role):,}",
                 layout(plan, role)]
        for index, (row, name) in enumerate(rows or [(None, "")]):
            cells = first if index == 0 else ["", "", "", ""]
            if row is None:
                table.add_row(*cells)
                continue
            style = VERDICT_STYLES[row.verdict]
            table.add_row(*cells, name,
                          plan_bars.against_limit(row.total, row.limit, 14 if wide else 8, style or "green", marks),
                          f"{gigabytes(row.total)}/{gigabytes(row.limit)} GB" if wide else
                          f"{gigabytes(row.total)}/{gigabytes(row.limit)}", Text(row.verdict, style))
    if forecast.split.spare:
        table.add_row(Text("spare", "dim"), f"{forecast.split.spare}",
                      f"{forecast.split.spare * forecast.cluster.gpus_per_node}")
    return table


def _shown(rows: Sequence[MemoryOf]) -> list[tuple[MemoryOf, str]]:
    """The first stage, the last stage and the worst one between them, in order, each with its name."""
    if len(rows) <= 1:
        return [(row, plain(row.name)) for row in rows]
    heaviest, last = worst(rows), len(rows) - 1
    return [(row, f"{plain(row.name)}, {'worst' if row is heaviest else 'first' if index == 0 else 'last'}")
            for index, row in enumerate(rows) if index in (0, last) or row is heaviest]


def _components(forecast: Forecast, console: Console) -> None:
    """Memory components of the worst GPU of each role."""
    for role in ("training", "rollout"):
        row = worst(each for each in forecast.memory if each.role == role)
        if row is not None:
            parts = sorted(row.components.items(), key=lambda item: -item[1])
            _line(console, f"  {plain(row.name)}", ", ".join(f"{plain(name)} {gigabytes(size)}"
                                                            for name, size in parts if size) + " GB", "")


def _step(forecast: Forecast, console: Console, width: int, marks: plan_bars.Marks) -> None:
    total = max([forecast.step_s, *(each.starts + each.seconds for each in forecast.phases)])
    ranges = {phase.name: f" ({seconds(phase.low)} to {seconds(phase.high)})" for phase in forecast.phases}
    room = max(map(len, ranges.values()), default=0) + 1
    columns = width - LABEL - (15 + room if width >= NARROW else 18)
    console.print()
    _line(console, "step", f"{seconds(forecast.step_s)} predicted ({seconds(forecast.step_low_s)} to "
                           f"{seconds(forecast.step_high_s)}); bottleneck: {plain(forecast.bottleneck)}")
    for phase in sorted(forecast.phases, key=lambda each: each.starts):
        line = Text(f"  {phase.name}".ljust(LABEL))
        line.append_text(plan_bars.span(phase.starts, phase.seconds, total, columns, PHASE_STYLES[phase.name], marks))
        share = phase.seconds / forecast.step_s if forecast.step_s else 0.0
        line.append(f" {seconds(phase.seconds):>9}")
        if width >= NARROW:
            line.append(ranges[phase.name].ljust(room), "dim")
        line.append(f"{share:>5.0%}")
        console.print(line, soft_wrap=True)
    console.print(Text(" " * LABEL + plan_bars.axis(total, columns), "dim"))


def _throughput(forecast: Forecast, console: Console, width: int, marks: plan_bars.Marks) -> None:
    rate = forecast.throughput
    strip = Text("throughput".ljust(LABEL))
    strip.append_text(plan_bars.with_uncertainty(rate.low, rate.nominal, rate.high, rate.target, width - LABEL,
                                                 marks))
    console.print(strip, soft_wrap=True)
    goal = "no target" if rate.target is None else f"target {human(rate.target)} ({marks.target}): "
    verdict = "" if rate.target is None else str(rate.verdict)
    _line(console, "", f"{_rate(rate.nominal)} prompts/h predicted ({marks.nominal}), {_rate(rate.low)} to "
                       f"{_rate(rate.high)}; {goal}{verdict}",
          words={verdict: VERDICT_STYLES[rate.verdict]} if verdict else None)


def _rollout(forecast: Forecast, console: Console) -> None:
    rollout, stale = forecast.rollout, forecast.staleness
    _line(console, "rollout", f"{seconds(rollout.tpot_s)} per output token, {_rate(rollout.tokens_per_s_per_gpu)} "
          f"tokens/s/GPU; {_rate(rollout.in_flight)} sequences in flight of {_rate(rollout.capacity)} that the "
          f"engines hold at once (load {rollout.load:.0%}); longest completion {seconds(rollout.longest_s)}; bound by "
          f"{plain(rollout.bound_by)}")
    if not forecast.asynchronous:
        text = "0 versions: the step is synchronous"
    else:
        bound = (f"longest completion {seconds(rollout.longest_s)} over a step of {seconds(forecast.step_s)}"
                 if stale.limit is None else f"algorithm.max_staleness {stale.limit}")
        text = f"at most {plural(stale.versions, 'version')} ({bound}), mean {significant(stale.mean, 2)}"
    _line(console, "staleness", text)


def _rewards(forecast: Forecast, console: Console) -> None:
    reward = forecast.reward
    if reward is not None:
        _line(console, "rewards", f"{seconds(reward.sample_s)} per completion on {reward.processes:,} process"
              f"{'es' if reward.processes > 1 else ''} of {plural(reward.nodes, 'training node')}: busy for "
              f"{seconds(reward.busy_s)} of a step, and {seconds(reward.behind_s)} behind the last completion")


def _sync(forecast: Forecast, console: Console, width: int) -> None:
    sync = forecast.sync
    _line(console, "weight sync", f"{sync.chosen}: {plain(sync.reason)}; {human(sync.payload_bytes, 'bytes')} per copy")
    for route in sync.routes:
        chosen = route.route == sync.chosen
        text = (f"{'>' if chosen else ' '} {route.route:<9}at least {seconds(route.lower_bound_s):>8}, expected "
                f"{seconds(route.expected_s):>8}")
        if width >= NARROW:
            text += (f"; busiest NIC {human(route.busiest_nic_out_bytes, 'bytes')} out, "
                     f"{human(route.busiest_nic_in_bytes, 'bytes')} in")
        _line(console, "", text, body="bold" if chosen else "")
        if chosen and route.communicators_total:
            _line(console, "", f"  {plural(route.communicators_total, 'communicator')}, opened at the start in "
                  f"{plural(route.opening_rounds, 'round')}, about {seconds(route.opening_s)}")
    if sync.pauses:
        _line(console, "", f"  engines stop {seconds(sync.pauses[sync.staging])} per sync ({sync.staging}); "
              + "; ".join(f"{staging} {seconds(pause)}" for staging, pause in sync.pauses.items()
                          if staging != sync.staging))
    if sync.disk:
        _line(console, "", f"  to disk every {plural(sync.disk.every, 'step')}: {human(sync.disk.bytes, 'bytes')} per "
              f"version, written and read back in {seconds(sync.disk.seconds)} while engines generate")
    if sync.gpu_order:
        _line(console, "", f"  engine GPU order {','.join(map(str, sync.gpu_order))}: "
              f"{human(sync.cross_rail_bytes, 'bytes')} cross rails "
              f"({human(sync.cross_rail_bytes_natural, 'bytes')} in natural order)")


def _reliability(forecast: Forecast, console: Console) -> None:
    it = forecast.reliability
    every = it.checkpoint_every_steps * forecast.step_s
    _line(console, "failures", f"one every {significant(it.job_mtbf_hours)} h expected; restart "
          f"{seconds(it.restart_s)}; with a checkpoint every {plural(it.checkpoint_every_steps, 'step')} "
          f"({seconds(every)}), {it.effective_time_ratio:.1%} of the time is progress")
    by = plural(forecast.split.training, "training node")
    writes = (f"steps wait {seconds(it.checkpoint_wait_s)} for the copy to host memory "
              f"({human(it.checkpoint_host_bytes, 'bytes')} a node), which is written in {seconds(it.checkpoint_s)} "
              f"beside them, by {by}" if it.checkpoint_host_bytes else
              f"steps wait {seconds(it.checkpoint_s)} for {by} to write it")
    _line(console, "checkpoints", f"{human(it.checkpoint_bytes, 'bytes')}: {writes}; a resume reads it in "
          f"{seconds(it.checkpoint_load_s)}")


def _warnings(forecast: Forecast, console: Console) -> None:
    if forecast.warnings:
        console.print()
    for warning in forecast.warnings:
        _line(console, plain(warning.code), plain(warning.message), "bold yellow")


def _line(console: Console, label: str, text: str, style: str = "bold", *, body: str = "",
          words: dict[str, str] | None = None) -> None:
    """Print a label with wrapped text next to it. A number is never separated from its unit.

    Args:
        style: style of the label.
        body: style of the text.
        words: phrases that are not broken, with their styles.
    """
    for phrase in words or {}:
        text = text.replace(phrase, phrase.replace(" ", NO_BREAK))
    text = re.sub(r"(?<=\d) (?=[A-Za-z%])", NO_BREAK, text)
    indent = len(text) - len(text.lstrip())
    width = min(WIDTH, console.width) - LABEL
    for index, part in enumerate(textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)):
        line = Text(part.replace(NO_BREAK, " "), body)
        for phrase, look in (words or {}).items():
            line.highlight_words([phrase], look)
        console.print(Text.assemble((("" if index else label).ljust(LABEL), style), line), soft_wrap=True)


def _rate(value: float) -> str:
    return f"{value:,.0f}"
