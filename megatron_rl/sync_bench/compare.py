"""Compares measurements with predictions: edges, parts of a sync, and this machine's coefficients. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.choose import SyncPrediction
from launch.fabric.estimate import Kind
from launch.fabric.routes import Route
from launch.fabric.seated import EngineRank, Seats
from megatron_rl.weight_sync.protocol import SyncReport, engine_name, member_name, trainer_name


class LaneSpeed(NamedTuple):
    """One lane between two processes, with nothing else running."""

    rate: float
    """bytes/s with large buckets."""
    chunk_s: float
    """Seconds for a bucket of a few bytes, including its acknowledgement: the cost of a bucket besides its bytes."""


class EdgeTime(NamedTuple):
    """What one process sends or forwards to another, in bytes, and the seconds until the last byte has arrived. None if
    the plan, or the sync that ran, has no such edge."""

    name: str
    planned_bytes: int | None
    bytes: int | None
    predicted_s: float | None
    measured_s: float | None

    @property
    def residual_s(self) -> float | None:
        """Measured minus predicted."""
        return None if self.predicted_s is None or self.measured_s is None else self.measured_s - self.predicted_s


class Part(NamedTuple):
    """A part of a sync, in seconds. None: there is no prediction for it."""

    name: str
    predicted_s: float | None
    measured_s: float

    @property
    def residual_s(self) -> float | None:
        """Measured minus predicted."""
        return None if self.predicted_s is None else self.measured_s - self.predicted_s


def edges(route: Route, arrivals: Sequence[float], seats: Seats,
          moved: Mapping[tuple[int | EngineRank, EngineRank], int],
          measured: Mapping[tuple[str, str], float]) -> list[EdgeTime]:
    """Each pair of a sending and a receiving process, in the order of receivers.

    Args:
        arrivals: arrivals of the route's edges, see `launch.fabric.simulate.arrivals`.
        moved: bytes per hop, see `SyncManifest.bytes_per_hop`.
        measured: seconds per hop, see `SyncReport.arrivals`.
    """
    names = {place: trainer_name(rank) for rank, place in enumerate(seats.training)}
    names |= {place: engine_name(*key) for key, place in seats.rollout.items()}
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    times: dict[tuple[str, str], float] = defaultdict(float)
    for edge, seconds in zip(route.edges, arrivals, strict=True):
        pair = names[edge.source], names[edge.destination]
        sizes[pair] += edge.bytes
        times[pair] = max(times[pair], seconds)
    ran = {(member_name(sender), member_name(receiver)): size
           for (sender, receiver), size in sorted(moved.items(), key=lambda hop: (hop[0][1], str(hop[0][0])))}
    return [EdgeTime(" -> ".join(pair), sizes.get(pair), ran.get(pair), times.get(pair), measured.get(pair))
            for pair in (*ran, *(pair for pair in sizes if pair not in ran))]


def parts(prediction: SyncPrediction, kind: Kind, coefficients: SyncCoefficients, report: SyncReport) -> list[Part]:
    """Parts of one sync by its slowest receiver's clock; the rest is the protocol. Digests overlap the transfer."""
    seconds, cost = report.seconds, prediction.routes[kind]
    held = cost.rollout_nic_in_bytes + cost.nvlink_bytes
    return [Part("pause and protocol", coefficients.pause_s + coefficients.barrier_s,
                 seconds["total"] - seconds["receive"]),
            Part("transfer, packing, digests", cost.expected_s - coefficients.pause_s - coefficients.barrier_s,
                 seconds["receive"]),
            Part("  digest of the live weights", held / coefficients.digest_rate, seconds["live_digest"]),
            Part("whole sync", cost.expected_s, seconds["total"])]


def pauses(predicted: Mapping[str, float], reports: Mapping[str, SyncReport]) -> list[Part]:
    """How long engines serve nothing during a sync, by `weight_sync.staging`."""
    return [Part(staging, predicted.get(staging), report.seconds["pause"]) for staging, report in reports.items()]


def found_coefficients(lane: LaneSpeed, nic_bandwidth: float, pack: float, digest: float,
                       report: SyncReport) -> dict[str, float]:
    """Coefficients that may replace the design values in a cluster file. The pause is left out, because it was measured
    on an idle engine and is nearly zero."""
    seconds = report.seconds
    protocol = seconds["total"] - seconds["receive"]
    return {"sync.nic_efficiency": min(1.0, lane.rate / nic_bandwidth), "sync.chunk_latency_s": lane.chunk_s,
            "sync.copy_rate": pack, "sync.digest_rate": digest, "sync.barrier_s": protocol}
