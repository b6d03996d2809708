"""Compares published weight transfers with the lower bound of `launch.fabric` and with a cost per engine class.

No published system moves shards as `launch.fabric` does, so `expected` describes what these systems do, in classes:

    gather_broadcast   full tensors gathered on the trainer, one sender, one call per tensor
    bucket_broadcast   packed buckets, one sender per pipeline stage (also over NIXL); the default without details
    reshard            every rank sends its overlap, or receivers pull it (also RDMA)
    send_plan          a plan of many unpacked sends and receives
    host_checkpoint    through host memory, everything to every GPU
    handover           trainer and engine on the same GPUs
    delta              only changed elements, encoded

The class is read from the description of the transport, never from regime or source. Most classes have points of a
single source, so their coefficients describe only that system. Bounds assume the best conceivable route: a node
receives each byte once, over all its NICs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launch.accuracy.fit import log_error, robust_mean, rounded, search
from launch.accuracy.interface import Predicted
from launch.accuracy.points import Point
from launch.coefficients.sync import DEFAULT_PUBLISHED, PublishedSyncCoefficients
from launch.planner.parameters import count, tensor_count

EngineClass = Literal["gather_broadcast", "bucket_broadcast", "reshard", "send_plan", "host_checkpoint", "handover",
                      "delta"]

QUANTITIES: Mapping[str, str] = {"sync_time_s": "s"}

FITTED: Mapping[EngineClass, tuple[str, ...]] = {
    "gather_broadcast": ("tensor_s", "gather_fixed_s", "gather_share"), "bucket_broadcast": ("bucket_share",),
    "reshard": ("reshard_fixed_s", "reshard_tensor_s"), "send_plan": ("send_plan_rate",),
    "host_checkpoint": ("host_fixed_s", "host_rate"),
    "handover": ("handover_fixed_s", "handover_rate"), "delta": ("delta_rate",)}
"""Fewer coefficients than a class has points."""
TYPICAL = {"tensor_s": 3e-4, "gather_fixed_s": 1.0, "gather_share": 0.2, "bucket_share": 0.2, "reshard_fixed_s": 0.1,
           "reshard_tensor_s": 3e-4, "send_plan_rate": 5e10, "host_fixed_s": 1.0, "host_rate": 5e10,
           "handover_fixed_s": 1.0, "handover_rate": 1e10, "delta_rate": 5e8}
"""Start of the search: round numbers of the expected order of magnitude."""
LINE_RATE = 50e9
"""bytes/s of a NIC if not stated: 400 Gb/s, the fastest NIC of these GPUs' generation."""
OLDER_LINE_RATE = 25e9
"""bytes/s of a NIC of A100 nodes for expected times (200 Gb/s is usual). Bounds use `LINE_RATE`."""
HOST_RATE = 64e9
"""bytes/s into a GPU from host memory: PCIe 5.0 x16 at line rate."""
NODE_GPUS = 8
TENSORS = 4000
"""Tensors of a model that is not described: between a dense model's hundreds and a mixture's tens of thousands."""
LEAST_FIXED_S = 0.05
"""Minimum time for a transfer between two programs to start and end."""
ENCODED = 0.78
"""Bytes on the link of a compressed delta, over the bytes of the changed elements."""
ENGINE_SHARE = 0.45
"""Maximum share of a GPU's memory for weights in an engine of unknown size, which also holds a KV cache."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A point in the model's terms."""

    kind: EngineClass
    payload: float
    """Bytes of the whole model on the wire."""
    engine_gpus: int
    """GPUs that share one copy: TP, or a node if replicas share one."""
    engine_split: int
    """Ranks that the engine splits the weights over."""
    training_gpus: int | None
    rollout_gpus: int | None
    stages: int
    """Pipeline stages that may send."""
    tensors: int
    nic: float | None
    """bytes/s, if stated."""
    older: bool
    """Whether the GPUs are of the A100 generation."""
    nvlink: float
    changed: float
    """Share of the elements that is transferred; 1 for all."""


def default() -> PublishedSyncCoefficients:
    return DEFAULT_PUBLISHED


def predict(point: Point, coefficients: PublishedSyncCoefficients) -> list[Predicted]:
    """Predict the time of a transfer, measured as one value or as a range."""
    low = point.number("measured.sync_time_s", point.number("measured.sync_time_low_s"))
    if low is None:
        return []
    high = point.number("measured.sync_time_s", point.number("measured.sync_time_high_s", low))
    transfer, reason = _transfer(point, bound=False)
    value = expected_s(transfer, coefficients) if transfer else None
    return [Predicted("sync_time_s", min(low, high), max(low, high), value, reason)]


def lower_bound_s(point: Point, coefficients: PublishedSyncCoefficients) -> float | None:
    """Lower bound in seconds of any route at line rate, from the payload alone if GPUs are not stated."""
    del coefficients                             # line rates: a bound uses no fitted value
    transfer, _ = _transfer(point, bound=True)
    if transfer is None:
        return None
    size = transfer.payload * transfer.changed
    gpus = transfer.engine_gpus
    if transfer.kind == "handover":
        return size / gpus / transfer.nvlink
    if transfer.kind == "host_checkpoint":
        return size / gpus / HOST_RATE
    nic = transfer.nic or LINE_RATE
    out = size / transfer.training_gpus / nic if transfer.training_gpus else 0.0
    return max(size / gpus / nic, out)


def expected_s(transfer: Transfer, c: PublishedSyncCoefficients) -> float:
    """Seconds that a system of this class takes."""
    size, tensors = transfer.payload, transfer.tensors
    nic = transfer.nic or (OLDER_LINE_RATE if transfer.older else LINE_RATE)
    if transfer.kind == "delta":
        return size * transfer.changed * ENCODED / c.delta_rate
    if transfer.kind == "handover":
        return c.handover_fixed_s + size / c.handover_rate
    if transfer.kind == "host_checkpoint":
        return c.host_fixed_s + size / c.host_rate
    if transfer.kind == "send_plan":
        return size / c.send_plan_rate
    if transfer.kind == "gather_broadcast":
        return c.gather_fixed_s + size / (c.gather_share * nic) + tensors * c.tensor_s
    if transfer.kind == "bucket_broadcast":
        return size / (c.bucket_share * nic * transfer.stages)
    into = size / transfer.engine_split
    out = 0.0
    if transfer.training_gpus and transfer.rollout_gpus:
        out = into * transfer.rollout_gpus / transfer.training_gpus
    return c.reshard_fixed_s + max(into, out) / (c.nic_efficiency * nic) + tensors * c.reshard_tensor_s


def calibrate(points: Sequence[Point], start: PublishedSyncCoefficients) -> PublishedSyncCoefficients:
    """Fit each class to its own points, from `TYPICAL`. A class without points keeps `start`."""
    known = []
    for point in points:
        transfer, _ = _transfer(point, bound=False)
        if point.calibrates and transfer is not None:
            known += [(transfer, each) for each in predict(point, start)]
    for kind, names in FITTED.items():
        mine = [(transfer, each) for transfer, each in known if transfer.kind == kind]
        if not mine:
            continue

        def cost(values: Mapping[str, float], mine=mine, base=start) -> float:
            tried = base.changed(dict(values))
            return robust_mean([_error(expected_s(transfer, tried), each) for transfer, each in mine])

        values = {name: TYPICAL[name] for name in names[:max(1, len(mine) - 1)]}
        limits = {name: (LEAST_FIXED_S, 60.0) for name in names if name.endswith("fixed_s")}
        start = start.changed(rounded(search(cost, values, bounds=limits, tolerance=1e-5, evaluations=3000)))
    return start


def _error(value: float, each: Predicted) -> float:
    """Logarithmic error from the middle of a published range. With its ends, the fit could drift between them."""
    return log_error(value, (each.measured_low * each.measured_high) ** 0.5)


def engine_class(point: Point) -> EngineClass:
    """The class according to the description of the transport, tested in this order."""
    transport = (point.text("transport") or "").lower()

    def named(*words: str) -> bool:
        return any(re.search(rf"\b{word}\b", transport) for word in words)

    if point.number("changed_fraction") is not None or named("delta"):
        return "delta"
    if named("in-place", "ipc", "colocated", "shared gpus"):
        return "handover"
    if named("plan") and named("send/recv"):
        return "send_plan"
    if named("host"):
        return "host_checkpoint"
    if named("full weights", "per-tensor"):
        return "gather_broadcast"
    if named("broadcast", "nixl"):          # the NIXL back ends of checkpoint engines also pass buckets along
        return "bucket_broadcast"
    if named("reshard", "point-to-point", "p2p", "rdma", "path not named"):     # the last: a measured rate, no system
        return "reshard"
    return "bucket_broadcast"


class_of = engine_class
"""Classes share no coefficients."""


def _transfer(point: Point, *, bound: bool) -> tuple[Transfer | None, str]:
    payload = _payload(point, bound=bound)
    if payload is None:
        return None, point.model_problem or "neither payload_bytes nor a described model"
    training, rollout = point.sizes("train_parallelism"), point.sizes("rollout_parallelism")
    gpus = point.integer("hardware.gpus_per_node") or NODE_GPUS
    receivers = point.integer("hardware.num_gpus_rollout")
    split = max(rollout.get("tp", 1) * rollout.get("pp", 1), rollout.get("ep", 1)) if rollout else None
    memory = point.gpu.hbm_bytes if point.gpu else 80e9
    smallest = _power_of_two(payload / (ENGINE_SHARE * memory))
    share = max(split or smallest, gpus)
    return Transfer(
        kind=engine_class(point), payload=payload, engine_gpus=min(share, receivers) if receivers else share,
        engine_split=split or (min(gpus, receivers) if receivers else gpus),
        training_gpus=point.integer("hardware.num_gpus_train"), rollout_gpus=receivers,
        stages=training.get("pp", 1), tensors=tensor_count(point.model) if point.model else TENSORS,
        nic=_nic(point, gpus), older="a100" in (point.text("hardware.gpu") or "").lower(),
        nvlink=point.gpu.nvlink_bandwidth if point.gpu else 450e9,
        changed=point.number("changed_fraction") or 1.0), ""


def _payload(point: Point, *, bound: bool) -> float | None:
    """Payload in bytes. An FP8 run is expected to send bf16, 2 bytes per element; its minimum is 1 byte."""
    stated = point.number("payload_bytes")
    if stated is not None and stated > 0:
        return stated
    if point.model is None:
        return None
    return count(point.model) * (1 if bound and _fp8(point) else 2)


def _fp8(point: Point) -> bool:
    return "fp8" in (point.text("precision") or "").lower()


def _nic(point: Point, gpus: int) -> float | None:
    """bytes/s per GPU, from "8x400Gbit InfiniBand"."""
    found = re.search(r"(\d+)\s*x\s*(\d+)\s*G", point.text("hardware.nic") or "")
    if not found:
        return None
    number, gigabits = int(found[1]), int(found[2])
    return gigabits / 8 * 1e9 * number / gpus if number and gigabits and gpus > 0 else None


def _power_of_two(value: float) -> int:
    power = 1
    while power < value:
        power *= 2
    return power
