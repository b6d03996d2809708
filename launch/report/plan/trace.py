"""A plan as a Chrome trace (chrome://tracing, ui.perfetto.dev): two steps, the pipeline of one update, the weight
sync. Times are predicted."""

from __future__ import annotations

from typing import Any

from launch.plan.forecast import Forecast
from launch.plan.plan import ForecastPlan, Plan
from launch.report.plan.file import with_forecast
from launch.report.plan.timeline import one_f_one_b, phases

STEPS = 2
PROCESSES = {"training": 1, "rollout": 2, "pipeline": 3, "sync": 4}
MICRO_BATCHES = "work.micro_batches"
"""Key in the book: micro-batches of one DP rank in one update."""
AFTER_PIPELINE = (("gradients", "training.dp_s"), ("optimizer", "training.optimizer_s"))
"""Work of an update after its last backward pass, and the key in the book of its exposed seconds."""
WHOLE = "training.total_s"
"""Key in the book: seconds of an update before the site's efficiency is applied. The phase includes it."""

Event = dict[str, Any]


def trace(plan: Plan) -> dict[str, Any]:
    """The JSON object of the trace-event format, with times in microseconds.

    Raises:
        UserError: the plan has no forecast.
    """
    plan = with_forecast(plan, "there is no timeline")
    events = _phases(plan.forecast) + _pipeline(plan) + _sync(plan.forecast)
    return {"traceEvents": _apart(events), "displayTimeUnit": "ms",
            "otherData": {"plan": plan.fingerprint(), "times": "predicted"}}


def _phases(forecast: Forecast) -> list[Event]:
    events = []
    details: dict[str, dict[str, float]] = {
        each.name: {"low_s": each.low, "nominal_s": each.seconds, "high_s": each.high} for each in forecast.phases}
    spans = phases(forecast, STEPS)
    shared = forecast.split.mode != "disaggregated"
    for partition in ("training",) if shared else ("training", "rollout"):
        nodes = getattr(forecast.split, partition)
        words = "training and rollout" if shared else f"{partition} partition"
        events.append(_process(PROCESSES[partition], f"{words} ({nodes} nodes), predicted"))
        for row in sorted({each.row for each in spans if each.partition == partition}):
            events.append(_thread(PROCESSES[partition], row, "phases" if row == 0 else f"phases, row {row + 1}"))
    for span in spans:
        events.append(_complete(span.name, PROCESSES[span.partition], span.row, span.start, span.seconds,
                                {"step": span.step} | details[span.name]))
    return events


def _pipeline(plan: ForecastPlan) -> list[Event]:
    """Micro-batches of the first update on the first and the last stage, within the first step's training phase."""
    forecast, training = plan.forecast, plan.training
    train = next((each for each in forecast.phases if each.name == "train"), None)
    book = {each.key: each.value for each in forecast.numbers}
    micro_batches = int(book.get(MICRO_BATCHES, 0))
    if train is None or train.seconds <= 0 or micro_batches < 1:
        return []
    update = train.seconds / plan.batch.updates_per_batch
    whole = book.get(WHOLE, 0.0)
    after = [(name, update * book.get(key, 0.0) / whole) for name, key in AFTER_PIPELINE] if whole > 0 else []
    computing = update - sum(seconds for _, seconds in after)
    if computing <= 0 or any(seconds < 0 for _, seconds in after):
        after, computing = [], update
    stages = one_f_one_b(training.pp, training.vpp, micro_batches, computing)
    shown = [0] if training.pp == 1 else [0, training.pp - 1]
    pid = PROCESSES["pipeline"]
    events = [_process(pid, f"one update: 1F1B of {micro_batches} micro-batches, predicted")]
    for stage in shown:
        layers = sum(map(len, training.layers_of_stage[stage]))
        events.append(_thread(pid, stage, f"stage {stage} ({layers} layers)"))
        for each in stages[stage]:
            events.append(_complete(
                f"{each.kind[0].upper()}{each.micro_batch}", pid, stage, train.starts + each.start, each.seconds,
                {"pass": each.kind, "micro_batch": each.micro_batch, "chunk": each.chunk}))
        start = train.starts + computing
        for name, seconds in after:
            if seconds > 0:
                events.append(_complete(name, pid, stage, start, seconds, {}))
            start += seconds
    return events


def _sync(forecast: Forecast) -> list[Event]:
    """Each route in the slot that the step gives the sync: the network's lower bound, and the time beyond it."""
    slot = next((each for each in forecast.phases if each.name == "sync"), None)
    if slot is None or not forecast.sync.routes:
        return []
    pid = PROCESSES["sync"]
    events = [_process(pid, "weight sync by route, predicted")]
    for row, route in enumerate(forecast.sync.routes):
        chosen = route.route == forecast.sync.chosen
        events.append(_thread(pid, row, f"{route.route}{', chosen' if chosen else ''}"))
        details = {"hops": route.hops, "busiest_nic_out_bytes": route.busiest_nic_out_bytes,
                   "busiest_nic_in_bytes": route.busiest_nic_in_bytes}
        floor = min(route.lower_bound_s, route.expected_s)
        free = 0.0                     # a route slower than a whole step is drawn once, not on top of itself
        for step in range(STEPS):
            start = step * forecast.step_s + slot.starts
            if start >= free:
                events.append(_complete("lower bound", pid, row, start, floor, details))
                events.append(_complete("above the bound", pid, row, start + floor, route.expected_s - floor,
                                        details))
                free = start + route.expected_s
    return events


def _apart(events: list[Event]) -> list[Event]:
    """Rounding to microseconds can let an event begin before its predecessor on the thread ends: move it."""
    ends: dict[tuple[int, int], int] = {}
    for event in sorted((each for each in events if each["ph"] == "X"), key=lambda each: each["ts"]):
        thread, end = (event["pid"], event["tid"]), event["ts"] + event["dur"]
        event["ts"] = max(event["ts"], ends.get(thread, 0))
        event["dur"] = max(0, end - event["ts"])
        ends[thread] = event["ts"] + event["dur"]
    return events


def _complete(name: str, pid: int, tid: int, start: float, seconds: float, details: dict[str, Any]) -> Event:
    """Round both ends, not the length, so that neighbours stay neighbours."""
    begin, end = round(start * 1e6), round((start + seconds) * 1e6)
    return {"name": name, "cat": "predicted", "ph": "X", "ts": begin, "dur": end - begin, "pid": pid, "tid": tid,
            "args": details}


def _process(pid: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "ts": 0, "pid": pid, "tid": 0, "args": {"name": name}}


def _thread(pid: int, tid: int, name: str) -> Event:
    return {"name": "thread_name", "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
