"""Measured collectives beside `planner.collectives`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.coefficients.collectives import CollectiveCoefficients
from launch.planner.time.collectives import Fabric, Group
from launch.validate.fit import log_error, robust_mean, rounded, search
from launch.validate.interface import Predicted, measured
from launch.validate.machine import cluster_of
from launch.validate.points import Point

QUANTITIES: Mapping[str, str] = {"time_s": "s", "bandwidth_bytes_per_s": "bytes/s"}

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
TYPICAL = {"ring_share": 0.8, "switch_share": 1.07, "nic_share": 0.85, "launch_s": 5e-6, "hop_s": 1.3e-6,
           "network_s": 1e-4, "node_hop_s": 1.4e-5, "chunk_s": 3e-6}
LIMITS = {"ring_share": (0.5, 1.0), "switch_share": (0.7, 1.3), "nic_share": (0.5, 1.0), "launch_s": (1e-6, 3e-5),
          "hop_s": (1e-7, 1e-5), "network_s": (1e-5, 5e-4), "node_hop_s": (3e-6, 5e-5),
          "chunk_s": (1e-7, 2e-5)}
HOLD = 0.002


def default() -> CollectiveCoefficients:
    return CollectiveCoefficients()


def predict(point: Point, coefficients: CollectiveCoefficients) -> list[Predicted]:
    """The time of a collective; copies between host and GPU have no model here."""
    seconds = _measured(point)
    if seconds is None:
        bandwidth = point.number("measured.bandwidth_bytes_per_s")
        return [] if bandwidth is None else [measured("bandwidth_bytes_per_s", bandwidth, None,
                                                      "copies over the host link are not modelled")]
    problem = _problem(point)
    return [measured("time_s", seconds, None if problem else _seconds(point, coefficients), problem)]


def calibrate(points: Sequence[Point], start: CollectiveCoefficients) -> CollectiveCoefficients:
    """Fit of `TYPICAL`'s coefficients, each regime weighted with the root of its points."""
    regimes: dict[str, list[tuple[Point, float]]] = {}
    for point in points:
        seconds = _measured(point)
        if point.calibrates and seconds is not None and not _problem(point):
            regimes.setdefault(point.regime, []).append((point, seconds))

    def cost(values: Mapping[str, float]) -> float:
        coefficients = start.changed(dict(values))
        fit = sum(len(rows) ** 0.5 * robust_mean([log_error(_seconds(point, coefficients), seconds)
                                                  for point, seconds in rows]) for rows in regimes.values())
        return fit + HOLD * sum(log_error(values[name], TYPICAL[name]) ** 2 for name in values)

    return start.changed(rounded(search(cost, TYPICAL, bounds=LIMITS, evaluations=900)))


def _measured(point: Point) -> float | None:
    for place in ("measured", "derived"):
        value = point.number(f"{place}.time_s")
        if value is not None and value > 0:
            return value
    return None


def _problem(point: Point) -> str:
    if point.gpu is None:
        return point.gpu_problem
    if point.text("op") not in OPERATIONS:
        return f"operation {point.text('op')} is not modelled"
    if not point.number("message_bytes") or not point.num_gpus:
        return "message size or number of GPUs is not stated"
    return ""


def _seconds(point: Point, coefficients: CollectiveCoefficients) -> float:
    cluster = cluster_of(point)
    fabric, size, ranks = Fabric(cluster, coefficients), point.number("message_bytes"), point.num_gpus
    if point.text("op") == "all_reduce" and point.text("kernel") is not None:      # an inference engine's own kernel
        return fabric.direct_all_reduce(size, ranks)
    return getattr(fabric, point.text("op"))(size, Group(ranks, min(ranks, cluster.gpus_per_node)))
