"""`megatron-rl plan diff A.json B.json`: differences between two plans, by subject, with relative changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from launch.errors import UserError
from launch.plan.forecast import Forecast, Number
from launch.plan.plan import Plan, forecast_of
from launch.report.plan.file import load_plan
from launch.report.plan.overview import layout
from launch.report.quantities import change, exact, human, plain, plural

__all__ = ["diff", "load_plan"]

Value = tuple[Any, str]
"""A value and its unit; "" for plain text and counts."""
ABSENT: Value = ("-", "")


def diff(a: Plan, b: Plan, names: tuple[str, str] = ("A", "B")) -> str:
    """The changes from plan `a` to plan `b`.

    Raises:
        UserError: the plans have different schema versions.
    """
    if a.schema_version != b.schema_version:
        raise UserError(
            f"{plain(names[0])} has schema_version {a.schema_version}, {plain(names[1])} {b.schema_version}",
            where="megatron-rl plan diff",
            fix="write both with the same version: megatron-rl plan CONFIG --out FILE",
        )
    if a == b:
        return f"{plain(names[0])} and {plain(names[1])}: the plans are identical ({a.fingerprint()})"
    same = a.fingerprint() == b.fingerprint()
    head = f"{plain(names[0])} -> {plain(names[1])}: " + (
        f"the same plan ({a.fingerprint()}), another forecast" if same else f"{a.fingerprint()} -> {b.fingerprint()}"
    )
    before, after = _subjects(a), _subjects(b)
    blocks = [head]
    for subject in before | after:
        lines = list(_changed(before.get(subject, {}), after.get(subject, {})))
        if lines:
            blocks.append("\n".join([subject, *lines]))
    blocks += _numbers(forecast_of(a), forecast_of(b))
    if len(blocks) == 1:
        blocks.append("only ranks or other derived fields differ")
    return "\n\n".join(blocks)


def _subjects(plan: Plan) -> dict[str, dict[str, Value]]:
    forecast = forecast_of(plan)
    return {
        "run": {"config hash": (plan.config_hash, ""), "device": (plan.device, "")}
        | {f"model {name}": (value, "") for name, value in asdict(plan.architecture).items()},
        "split": {"forecast": ("none", "")} if forecast is None else _split(forecast),
        "layouts": {"training": (layout(plan, "training"), ""), "rollout": (layout(plan, "rollout"), ""),
                    "sequence parallel": (plan.training.sequence_parallel, ""),
                    "layers of stages": ([sum(map(len, stage)) for stage in plan.training.layers_of_stage], "")},
        "batch": {name.replace("_", " "): (value, "") for name, value in plan.batch.model_dump().items()},
    } | ({} if forecast is None else _predicted(forecast))


def _predicted(forecast: Forecast) -> dict[str, dict[str, Value]]:
    reliability = forecast.reliability
    return {
        "memory of a GPU": _memory(forecast),
        "step": {"whole step": (forecast.step_s, "s"), "at best": (forecast.step_low_s, "s"),
                 "at worst": (forecast.step_high_s, "s"), "bottleneck": (forecast.bottleneck, "")}
        | {each.name: (each.seconds, "s") for each in forecast.phases},
        "throughput": _throughput(forecast),
        "rollout and staleness": _rollout(forecast),
        "weight sync": _sync(forecast),
        "reliability": {"job MTBF": (reliability.job_mtbf_hours * 3600, "s"),
                        "checkpoint size": (reliability.checkpoint_bytes, "bytes"),
                        "checkpoint": (reliability.checkpoint_s, "s"),
                        "checkpoint wait": (reliability.checkpoint_wait_s, "s"),
                        "checkpoint host memory": (reliability.checkpoint_host_bytes, "bytes"),
                        "checkpoint load": (reliability.checkpoint_load_s, "s"),
                        "checkpoint every": (reliability.checkpoint_every_steps, "steps"),
                        "restart": (reliability.restart_s, "s"),
                        "effective time ratio": (reliability.effective_time_ratio, "")},
        "choices": {each.key: (each.value, "") for each in forecast.choices},
        "warnings": {each.code: (each.message, "") for each in forecast.warnings},
    }


def _split(forecast: Forecast) -> dict[str, Value]:
    cluster, split = forecast.cluster, forecast.split
    return {"cluster": (cluster.name, ""), "cluster nodes": (cluster.nodes, ""),
            "GPUs a node": (cluster.gpus_per_node, ""), "GPU": (cluster.gpu, ""),
            "NICs a node": (cluster.nics_per_node, ""), "NIC bandwidth": (cluster.nic_bandwidth, "bytes/s"),
            "rails": (cluster.rails, ""), "leaves": (list(cluster.leaves), ""), "mode": (split.mode, ""),
            "training nodes": (split.training, ""), "rollout nodes": (split.rollout, ""),
            "spare nodes": (split.spare, ""), "asynchronous": (forecast.asynchronous, "")}


def _memory(forecast: Forecast) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for each in forecast.memory:
        found[f"{each.role} {each.name}"] = (each.total, "bytes")
        found[f"{each.role} {each.name} limit"] = (each.limit, "bytes")
        found[f"{each.role} {each.name} verdict"] = (each.verdict, "")
        found |= {f"{each.role} {each.name} {part}": (size, "bytes") for part, size in each.components.items()}
    return found


def _throughput(forecast: Forecast) -> dict[str, Value]:
    rate = forecast.throughput
    target: Value = ("none", "") if rate.target is None else (rate.target, "prompts/h")
    return {"nominal": (rate.nominal, "prompts/h"), "low": (rate.low, "prompts/h"), "high": (rate.high, "prompts/h"),
            "target": target, "verdict": (rate.verdict, "")}


def _rollout(forecast: Forecast) -> dict[str, Value]:
    units = {"tpot_s": "s", "longest_s": "s", "tokens_per_s_per_gpu": "tokens/s"}
    found: dict[str, Value] = {name.removesuffix("_s").replace("_", " "): (value, units.get(name, ""))
                               for name, value in forecast.rollout.model_dump().items()}
    stale = forecast.staleness
    return found | {"staleness": (stale.versions, "versions"), "mean staleness": (stale.mean, "versions"),
                    "staleness limit": ("none" if stale.limit is None else stale.limit, "")}


def _sync(forecast: Forecast) -> dict[str, Value]:
    sync = forecast.sync
    found: dict[str, Value] = {"route": (sync.chosen, ""), "payload": (sync.payload_bytes, "bytes"),
                               "GPU order": (list(sync.gpu_order), ""),
                               "bytes that leave their rail": (sync.cross_rail_bytes, "bytes"),
                               "staging": (sync.staging, "")}
    if sync.pauses:
        found["engines stop"] = (sync.pauses[sync.staging], "s")
    for route in sync.routes:
        found[f"{route.route}, expected"] = (route.expected_s, "s")
        found[f"{route.route}, at least"] = (route.lower_bound_s, "s")
    return found


def _changed(before: Mapping[str, Value], after: Mapping[str, Value]) -> Iterator[str]:
    names = [*before, *(name for name in after if name not in before)]
    for name in names:
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if old != new:
            yield _line(name, old, new)


def _line(name: str, old: Value, new: Value) -> str:
    shown = [_shown(each, human) for each in (old, new)]
    if shown[0] == shown[1]:                       # the difference is in digits that were rounded away
        shown = [_shown(each, exact) for each in (old, new)]
    relative = change(old[0], new[0]) if all(_is_number(each[0]) for each in (old, new)) else ""
    return f"  {plain(name):<34} {shown[0]} -> {shown[1]}" + (f"  ({relative})" if relative else "")


def _shown(value: Value, number) -> str:
    return number(*value) if _is_number(value[0]) else plain(str(value[0]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(a: Forecast | None, b: Forecast | None) -> list[str]:
    """Lines of the book that changed: given numbers first, then computed ones."""
    before, after = ({each.key: each for each in (forecast.numbers if forecast else ())} for forecast in (a, b))
    keys = [*before, *(key for key in after if key not in before)]
    given: list[str] = []
    computed: list[str] = []
    alone = {"only in the first": 0, "only in the second": 0}
    for key in keys:
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            alone["only in the first" if new is None else "only in the second"] += 1
        elif (old.value, old.unit) != (new.value, new.unit):
            (computed if old.inputs or new.inputs else given).append(
                _line(key, (old.value, old.unit), (new.value, new.unit)))
        elif _origin(old) != _origin(new):
            given.append(f"  {plain(key):<34} {plain(_origin(old))} -> {plain(_origin(new))}")
    blocks = []
    if given:
        blocks.append("\n".join([f"given numbers ({len(given)} changed)", *given]))
    if computed:
        blocks.append("\n".join([f"computed numbers ({len(computed)} changed)", *computed]))
    counts = [f"{plural(count, 'number')} {where}" for where, count in alone.items() if count]
    return blocks + ([f"also: {', '.join(counts)}"] if counts else [])


def _origin(number: Number) -> str:
    return number.formula or number.source
