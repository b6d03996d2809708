"""The three routes beside each other, and which one to take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt

from launch.cluster.spec import ClusterSpec
from launch.coefficients.sync import DEFAULT, SyncCoefficients
from launch.fabric.bounds import Bounds, bounds
from launch.fabric.communicators import Communicators, communicators
from launch.fabric.estimate import DEFAULT_BUCKET, KINDS, RECEIVING, SENDING, Kind, Loads, loads, times
from launch.fabric.lanes import Fabric, Traffic, fabric_of, traffic
from launch.fabric.record import write
from launch.fabric.routes import Route, build
from launch.fabric.simulate import Simulation, simulate
from launch.model.shape import ModelShape
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import Precision, RolloutLayout, TrainingLayout

TIE = 0.01
"""Relative difference of expected times below which the simpler route is taken."""


@dataclass(frozen=True, slots=True)
class RouteCost:
    """One route, predicted."""

    kind: Kind
    lower_bound_s: float
    """Busiest NIC of this route at line rate."""
    wire_s: float
    """First byte to last byte, expected."""
    expected_s: float
    """The whole sync."""
    trainer_nic_out_bytes: int
    rollout_nic_in_bytes: int
    rollout_nic_out_bytes: int
    """What the busiest rollout NIC forwards; 0 for `direct`."""
    nvlink_bytes: int
    """Between twins of a node, into the busiest GPU."""
    hops: int
    chunk_bytes: int
    trainer_staging_bytes: int
    """Two chunks on each sending GPU."""
    rollout_staging_bytes: int
    """Two chunks for each transfer that a receiving GPU takes in at once; what it forwards leaves from there."""
    transfers: int
    """Large ones into the busiest rollout NIC."""


@dataclass(frozen=True, slots=True)
class SyncPrediction:
    """Weight sync of one plan."""

    routes: dict[Kind, RouteCost]
    chosen: Kind
    reason: str
    floor_s: float
    """Below which no route can be."""
    floor_by: str
    """ingress, egress, source, spine or nvlink."""
    replica_bytes: int
    """What one engine takes."""
    gpu_order: tuple[int, ...]
    """GPUs of a node's engine ranks (`CUDA_VISIBLE_DEVICES`)."""
    cross_rail_bytes: int
    """Of all rollout nodes' bytes, those that change rails, with this order ..."""
    natural_cross_rail_bytes: int
    """... and with the natural order."""
    wire_precision: str
    traffic: Traffic
    """What moves, for `build`."""
    limits: Bounds
    quantise: bool
    """The engines quantise what they receive."""
    notes: tuple[str, ...] = ()

    @property
    def cost(self) -> RouteCost:
        return self.routes[self.chosen]

    @property
    def seconds(self) -> float:
        return self.cost.expected_s

    def build(self, kind: Kind | None = None) -> Route:
        """The edges of a route, by default the chosen one."""
        kind = kind or self.chosen
        return build(self.traffic, kind, self.routes[kind].chunk_bytes)

    def communicators(self, coefficients: SyncCoefficients = DEFAULT, kind: Kind | None = None) -> Communicators:
        """Communicators on a GPU and their memory, by default of the chosen route."""
        return communicators(self.build(kind), coefficients)

    def simulate(self, coefficients: SyncCoefficients = DEFAULT, kind: Kind | None = None) -> Simulation:
        """A route chunk by chunk, by default the chosen one."""
        return simulate(self.build(kind), coefficients, quantise=self.quantise)


def predict(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, cluster: ClusterSpec,
            coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2, rollout_precision: Precision = "bf16",
            lora_rank: int = 0, route: str = "auto", bucket_bytes: int = DEFAULT_BUCKET, senders_limit: int = 0,
            fabric: Fabric | None = None, book: Book = NO_BOOK) -> SyncPrediction:
    """Times of all routes, and the choice.

    Args:
        weight_bytes: bytes of an element on the wire.
        rollout_precision: fp8: bf16 travels and the engine quantises what it received.
        lora_rank: only adapters of this rank travel; 0: all weights.
        route: auto, or the route that a configuration pins.
        bucket_bytes: the largest chunk.
        senders_limit: most holders of a shard that may send; 0: all DP x CP.
        fabric: default: of `cluster`, nodes in its order.
    """
    fabric = fabric or fabric_of(cluster)
    moved = traffic(shape, training, rollout, fabric, element_bytes=weight_bytes, lora_rank=lora_rank,
                    senders_limit=senders_limit)
    quantise = rollout_precision == "fp8" and not lora_rank
    costs: dict[Kind, RouteCost] = {}
    for kind in KINDS:
        load = loads(moved, kind)
        costs[kind] = _cost(moved, kind, load, coefficients, bucket_bytes, quantise)
    chosen = least({kind: cost.expected_s for kind, cost in costs.items()}) if route == "auto" else _pinned(route)
    limits = bounds(moved)
    natural = traffic(shape, training, rollout, fabric, element_bytes=weight_bytes, lora_rank=lora_rank,
                      senders_limit=senders_limit, solve_order=False)
    prediction = SyncPrediction(
        routes=costs, chosen=chosen, reason=_reason(costs, chosen, limits, moved, pinned=route != "auto"),
        floor_s=limits.floor, floor_by=limits.binding, replica_bytes=moved.replica_bytes, gpu_order=moved.order,
        cross_rail_bytes=moved.crossing_bytes(), natural_cross_rail_bytes=natural.crossing_bytes(),
        wire_precision={1: "fp8", 2: "bf16", 4: "fp32"}.get(weight_bytes, f"{weight_bytes} bytes"), traffic=moved,
        limits=limits, quantise=quantise,
        notes=_notes(quantise, lora_rank, moved, natural))
    if book.keeps:
        write(prediction, shape, training, rollout, lora_rank, coefficients, book)
    return prediction


def fastest(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
            coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2, rollout_precision: Precision = "bf16",
            lora_rank: int = 0, bucket_bytes: int = DEFAULT_BUCKET, senders_limit: int = 0) -> tuple[Kind, float]:
    """(route, expected seconds) that `predict` would choose: what a search calls, a few 100 us."""
    moved = traffic(shape, training, rollout, fabric, element_bytes=weight_bytes, lora_rank=lora_rank,
                    senders_limit=senders_limit)
    quantise = rollout_precision == "fp8" and not lora_rank
    seconds = {kind: expected_seconds(moved, kind, coefficients, bucket_bytes=bucket_bytes, quantise=quantise)
               for kind in KINDS}
    chosen = least(seconds)
    return chosen, seconds[chosen]


def least_seconds(shape: ModelShape, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
                  coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2,
                  rollout_precision: Precision = "bf16", lora_rank: int = 0,
                  bucket_bytes: int = DEFAULT_BUCKET) -> float:
    """What `fastest` cannot fall below, whatever the number of trainers (DP, CP) and of engines: enough senders on every
    rail, so that no receiver forwards and the busiest NIC is a receiver's. A search's bound: equal to `fastest` wherever
    senders do suffice."""
    if fabric.nics_per_node < fabric.gpus_per_node:     # which GPUs share a NIC depends on the engines' order
        return coefficients.pause_s + coefficients.barrier_s
    each = max(1, fabric.gpus_per_node // (rollout.tp * rollout.pp))
    full = replace(rollout, replicas=min(rollout.replicas, each))
    moved = traffic(shape, training, full, fabric, element_bytes=weight_bytes, lora_rank=lora_rank)
    load = loads(moved, "direct")._replace(egress=0.0)
    found = times(moved, "direct", coefficients, bucket_bytes=bucket_bytes, load=load,
                  quantise=rollout_precision == "fp8" and not lora_rank)
    # A route over relays has smaller chunks: it packs its first and last one sooner, pays their latency more often, and
    # passes at least one on.
    nvlink_rate = fabric.nvlink_bandwidth * coefficients.nvlink_efficiency
    rate, latency = fabric.nic_bandwidth * coefficients.nic_efficiency, coefficients.chunk_latency_s
    sooner = 2 / coefficients.copy_rate + (1 / nvlink_rate if load.nvlink else 0.0)
    if load.nvlink and found.wire < (load.nvlink + found.chunk_bytes) / nvlink_rate:
        return found.expected - found.chunk_bytes * sooner
    chunk = min(bucket_bytes, max(1.0, sqrt(load.busiest * latency / (1 / rate + sooner))))
    direct = load.busiest / found.chunk_bytes * latency + found.chunk_bytes * sooner
    relayed = load.busiest / chunk * latency + chunk * (1 / rate + sooner) + latency
    return found.expected - max(0.0, direct - relayed)


def expected_seconds(moved: Traffic, kind: Kind, coefficients: SyncCoefficients = DEFAULT, *,
                     bucket_bytes: int = DEFAULT_BUCKET, quantise: bool = False) -> float:
    """Expected time of one route."""
    return times(moved, kind, coefficients, bucket_bytes=bucket_bytes, quantise=quantise).expected


def least(seconds: Mapping[Kind, float]) -> Kind:
    """The fastest; of those within `TIE` of it the simplest."""
    best = min(seconds.values())
    return next(kind for kind in KINDS if seconds[kind] <= best * (1 + TIE))


def _cost(moved: Traffic, kind: Kind, load: Loads, coefficients: SyncCoefficients, bucket_bytes: int,
          quantise: bool) -> RouteCost:
    found = times(moved, kind, coefficients, bucket_bytes=bucket_bytes, quantise=quantise, load=load)
    return RouteCost(
        kind=kind, lower_bound_s=found.lower_bound, wire_s=found.wire, expected_s=found.expected,
        trainer_nic_out_bytes=round(load.egress), rollout_nic_in_bytes=load.ingress,
        rollout_nic_out_bytes=load.relay_egress, nvlink_bytes=load.nvlink, hops=load.hops,
        chunk_bytes=found.chunk_bytes, trainer_staging_bytes=SENDING * found.chunk_bytes,
        rollout_staging_bytes=RECEIVING * found.chunk_bytes * load.streams, transfers=load.transfers)


def _pinned(route: str) -> Kind:
    for kind in KINDS:
        if kind == route:
            return kind
    raise ValueError(f"route {route!r} is none of auto, {', '.join(KINDS)}")


def _reason(costs: dict[Kind, RouteCost], chosen: Kind, limits: Bounds, moved: Traffic, *, pinned: bool) -> str:
    """One sentence with the numbers that decided."""
    cost = costs[chosen]
    others = ", ".join(f"{kind} {costs[kind].expected_s:.2f} s" for kind in KINDS if kind != chosen)
    if pinned:
        return f"pinned: {chosen} {cost.expected_s:.2f} s against {others}"
    direct = costs["direct"]
    if chosen == "direct":
        why = (f"training NICs send {direct.trainer_nic_out_bytes / 1e9:.1f} GB while rollout NICs take "
               f"{direct.rollout_nic_in_bytes / 1e9:.1f} GB: senders suffice, no receiver need forward")
        if direct.trainer_nic_out_bytes > direct.rollout_nic_in_bytes:
            why = "forwarding would not gain more than it adds"
    else:
        why = (f"direct, each training NIC would send {direct.trainer_nic_out_bytes / 1e9:.1f} GB; where receivers "
               f"forward it sends {cost.trainer_nic_out_bytes / 1e9:.1f} GB and the {moved.rollout_nodes} rollout "
               f"nodes pass the rest on, {cost.hops} hops")
    floor = f"floor {limits.floor:.2f} s by {limits.binding}"
    return f"{chosen} {cost.expected_s:.2f} s against {others}; {why} ({floor})"


def _notes(quantise: bool, lora_rank: int, moved: Traffic, natural: Traffic) -> tuple[str, ...]:
    notes = []
    if quantise:
        notes.append("bf16 travels; each engine quantises to FP8 what it received, so an FP8 rollout saves no bytes")
    if lora_rank:
        notes.append(f"only LoRA adapters of rank {lora_rank} travel; every engine rank takes them whole")
    before, after = natural.crossing_bytes(), moved.crossing_bytes()
    if before != after:
        notes.append(f"engine GPU order {','.join(map(str, moved.order))}: {before / 1e9:.1f} GB would change rails "
                     f"in the natural order, {after / 1e9:.1f} GB do")
    return tuple(notes)
