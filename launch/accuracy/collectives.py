"""Compares measured collectives with `launch.planner.time.collectives`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.accuracy.fit import fit_regimes, log_error
from launch.accuracy.interface import Predicted, measured
from launch.accuracy.machine import cluster_of
from launch.accuracy.points import Point
from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.planner.time.collectives import CollectiveTime, RankGroup

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
    """The time of a collective. Copies between host and GPU are not modelled."""
    seconds = _measured(point)
    if seconds is None:
        bandwidth = point.number("measured.bandwidth_bytes_per_s")
        return [] if bandwidth is None else [measured("bandwidth_bytes_per_s", bandwidth, None,
                                                      "copies over the host link are not modelled")]
    run = _run(point)
    if isinstance(run, str):
        return [measured("time_s", seconds, None, run)]
    return [measured("time_s", seconds, _seconds(run, coefficients))]


def calibrate(points: Sequence[Point], start: CollectiveCoefficients) -> CollectiveCoefficients:
    """Fit the coefficients in `TYPICAL`."""
    regimes: dict[str, list[tuple[_Run, float]]] = {}
    for point in points:
        seconds, run = _measured(point), _run(point)
        if point.calibrates and seconds is not None and not isinstance(run, str):
            regimes.setdefault(point.regime, []).append((run, seconds))
    return fit_regimes(start, regimes, lambda run, c: log_error(_seconds(run[0], c), run[1]), TYPICAL, LIMITS,
                       hold=HOLD, evaluations=900)


def _measured(point: Point) -> float | None:
    for place in ("measured", "derived"):
        value = point.number(f"{place}.time_s")
        if value is not None and value > 0:
            return value
    return None


@dataclass(frozen=True)
class _Run:
    """A point in the model's terms."""

    operation: str
    cluster: ClusterSpec
    bytes: float
    ranks: int
    own_kernel: bool
    """Whether it is an inference engine's own all-reduce."""


def _run(point: Point) -> _Run | str:
    """The point in the model's terms, or the reason why there is none."""
    if point.gpu is None:
        return point.gpu_problem
    operation, size, ranks = point.text("op"), point.number("message_bytes"), point.num_gpus
    if operation not in OPERATIONS:
        return f"operation {operation} is not modelled"
    if not size or not ranks:
        return "message size or number of GPUs is not stated"
    return _Run(operation, cluster_of(point, point.gpu), size, ranks, point.text("kernel") is not None)


def _seconds(run: _Run, coefficients: CollectiveCoefficients) -> float:
    comm = CollectiveTime(run.cluster, coefficients)
    if run.operation == "all_reduce" and run.own_kernel:
        return comm.direct_all_reduce(run.bytes, run.ranks)
    return getattr(comm, run.operation)(run.bytes, RankGroup(run.ranks, min(run.ranks, run.cluster.gpus_per_node)))
