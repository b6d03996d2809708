"""Checks besides small errors: orderings, bounds and verdicts, each with a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import cast

from launch.accuracy.interface import KindModule, SyncModule
from launch.accuracy.points import Point
from launch.accuracy.score import Row, module, predict

FLAT = 0.03
"""Growth of the step time over a series of weak scaling that still counts as flat."""
WORTH_ORDERING = 0.02
"""Measured rates closer than this do not tell which layout is faster."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """`passed` is None if the points do not allow the check."""

    name: str
    passed: bool | None
    detail: str


def run_checks(rows: Sequence[Row], find: Callable[[str], KindModule] = module) -> list[Requirement]:
    """All checks of the kinds that occur in the rows."""
    checks: dict[str, list[Callable[[Sequence[Row]], Requirement]]] = {
        "parameters": [_exact_counts], "memory": [_known_oom],
        "training": [_tensor_parallel_order, lambda mine: _tp4_beats_tp8(mine, find), _weak_scaling],
        "weight_sync": [lambda mine: _lower_bound(mine, cast(SyncModule, find("weight_sync"))),
                        lambda mine: _within_twice(mine, cast(SyncModule, find("weight_sync")))]}
    found = []
    for kind, each in checks.items():
        mine = [row for row in rows if row.point.kind == kind]
        if mine:
            found += [check(mine) for check in each]
    return found


def _check(name: str, failures: Sequence[str], checked: int, of_what: str) -> Requirement:
    if not checked:
        return Requirement(name, None, f"no {of_what}")
    if failures:
        return Requirement(name, False, f"{len(failures)} of {checked} {of_what}: {'; '.join(failures[:3])}")
    return Requirement(name, True, f"{checked} {of_what}")


def _exact_counts(rows: Sequence[Row]) -> Requirement:
    known = [row for row in rows if row.result.predicted is not None]
    wrong = [f"{row.point.id} {row.result.predicted:,.0f}, not {row.result.measured_low:,.0f}" for row in known
             if row.result.predicted != row.result.measured_low]
    return _check("parameter counts are exact", wrong, len(known), "models")


def _known_oom(rows: Sequence[Row]) -> Requirement:
    known = [row for row in rows if row.result.quantity == "fits" and row.result.measured_high == 0
             and row.result.predicted is not None]
    wrong = [row.point.id for row in known if row.result.predicted]
    return _check("never fits where a run is known to have run out of memory", wrong, len(known), "such runs")


def _rate(row: Row, value: float) -> float | None:
    """Tokens/s/GPU of a training row with `value` in place of its quantity."""
    if row.result.quantity == "tokens_per_s_per_gpu":
        return value
    batch, length, gpus = (row.point.number(name) for name in ("global_batch", "seq_len", "hardware.num_gpus"))
    if row.result.quantity != "step_time_s" or not (batch and length and gpus and value):
        return None
    return batch * length / (gpus * value)


def _rates(row: Row) -> tuple[float, float] | None:
    """Measured and predicted tokens/s/GPU."""
    if row.result.predicted is None:
        return None
    measured, predicted = _rate(row, row.result.measured_low), _rate(row, row.result.predicted)
    return None if measured is None or predicted is None else (measured, predicted)


def _setting(point: Point, *names: str) -> tuple:
    return (point.model_name, str(point.get("model_overrides")), point.gpu and point.gpu.name,
            *(str(point.get(name)) for name in ("precision", "seq_len", "task", "recompute", *names)))


def _tensor_parallel_order(rows: Sequence[Row]) -> Requirement:
    """Compare pairs of runs with one model, GPU, precision and length at two TP sizes."""
    known = [(row, rates) for row in rows if (rates := _rates(row)) and row.point.integer("parallelism.fsdp", 1) == 1
             and row.point.integer("parallelism.tp")]
    wrong, checked = [], 0
    for (a, rates_a), (b, rates_b) in combinations(known, 2):
        sizes = [row.point.integer("parallelism.tp") for row in (a, b)]
        if sizes[0] == sizes[1] or _setting(a.point) != _setting(b.point) \
                or abs(rates_a[0] / rates_b[0] - 1) < WORTH_ORDERING:
            continue
        checked += 1
        if (rates_a[0] > rates_b[0]) != (rates_a[1] > rates_b[1]):
            wrong.append(f"{a.point.id} against {b.point.id}")
    return _check("measured order of tensor-parallel sizes kept", wrong, checked, "pairs")


def _tp4_beats_tp8(rows: Sequence[Row], find: Callable[[str], KindModule]) -> Requirement:
    """Compare with the same run at TP 8 and half the DP on 8-GPU nodes, all inside NVLink. Each GPU then gets narrower
    matrices and larger collectives for the same share of the work, so it cannot be faster."""
    wrong, checked = [], 0
    for row in rows:
        rates, data = _rates(row), row.point.get("parallelism")
        sizes = row.point.sizes()
        if rates is None or sizes.get("tp") != 4 or sizes.get("dp", 1) % 2 or sizes.get("fsdp", 1) > 1:
            continue
        wider = replace(row.point, data={**row.point.data, "parallelism": {**data, "tp": 8, "dp": sizes["dp"] // 2}})
        other = next((each for each in predict([wider], find) if each.result.quantity == row.result.quantity), None)
        other_rates = other and _rates(other)
        if other_rates:
            checked += 1
            if other_rates[1] > rates[1]:
                wrong.append(row.point.id)
    return _check("TP 8 with half the DP is not faster than TP 4", wrong, checked, "runs with TP 4")


def _weak_scaling(rows: Sequence[Row]) -> Requirement:
    """Compare runs with the same work per GPU on more GPUs: if the measured step time is flat, so is the prediction."""
    families: dict[tuple, list[tuple[int, float, float]]] = {}
    for row in rows:
        rates, gpus, batch = _rates(row), row.point.num_gpus, row.point.number("global_batch")
        if rates is None or not gpus or not batch or row.point.text("task") == "lora":
            continue
        sizes = {name: size for name, size in row.point.sizes().items() if name not in ("dp", "fsdp")}
        source = row.point.get("source")
        key = (*_setting(row.point, "micro_batch", "grad_dtype"), str(sizes), str(source), batch / gpus)
        families.setdefault(key, []).append((gpus, *rates))
    wrong, checked, sloping = [], 0, []
    for members in families.values():
        (low, measured_low, predicted_low), (high, measured_high, predicted_high) = min(members), max(members)
        measured, predicted = measured_low / measured_high - 1, predicted_low / predicted_high - 1
        figures = f"{low} to {high} GPUs: {predicted:+.1%} predicted, {measured:+.1%} measured"
        if low == high:
            continue
        if abs(measured) > FLAT:
            sloping.append(figures)
            continue
        checked += 1
        if abs(predicted) > FLAT:
            wrong.append(figures)
    check = _check("weak scaling flat where it was measured flat (3 %)", wrong, checked, "series")
    aside = f"; measured to slope, not counted: {'; '.join(sloping)}" if sloping else ""
    return replace(check, detail=check.detail + aside)


def _lower_bound(rows: Sequence[Row], model: SyncModule) -> Requirement:
    wrong, checked = [], 0
    coefficients = model.default()
    for row in rows:
        bound = model.lower_bound_s(row.point, coefficients)
        if bound is None or row.result.predicted is None:
            continue
        checked += 1
        if bound >= row.result.measured_low:
            wrong.append(f"{row.point.id}: {bound:.2f} s, measured {row.result.measured_low:.2f}")
    return _check("sync lower bound below every measurement", wrong, checked, "transfers")


GOOD = 10.0
"""A good system: its transfer takes at most this many times the lower bound."""


def _within_twice(rows: Sequence[Row], model: SyncModule) -> Requirement:
    wrong, checked = [], 0
    coefficients = model.default()
    for row in rows:
        bound, predicted = model.lower_bound_s(row.point, coefficients), row.result.predicted
        if bound is None or predicted is None or row.result.measured_low > GOOD * bound:
            continue
        checked += 1
        if not row.result.measured_low / 2 <= predicted <= 2 * row.result.measured_high:
            wrong.append(f"{row.point.id}: {predicted:.2f} s, measured {row.result.measured_low:.2f}")
    return _check("expected sync time within 2x of the good systems", wrong, checked,
                  f"transfers within {GOOD:.0f}x of the lower bound")
