"""Compares the three routes and chooses one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

from launch.cluster.spec import ClusterSpec
from launch.coefficients.sync import DEFAULT, SyncCoefficients
from launch.fabric.bounds import Bounds
from launch.fabric.communicators import Communicators, communicators
from launch.fabric.estimate import DEFAULT_BUCKET, KINDS, Kind, RouteCost
from launch.fabric.lanes import Fabric, Traffic, fabric_of, traffic
from launch.fabric.routes import Route, build
from launch.fabric.shards import flows
from launch.fabric.simulate import Simulation, simulate
from launch.model.architecture import Architecture
from launch.plan.book import line, made, part
from launch.plan.layouts import Precision, RolloutLayout, TrainingLayout

TIE = 0.01
"""Relative difference of expected times below which the simpler route is chosen."""


def _route(kind: Kind) -> made[RouteCost]:
    return made(partial(RouteCost, kind), traffic="traffic", fabric="fabric", c="coefficients",
                bucket_bytes="bucket_bytes",
                quantise="quantise")


@dataclass(eq=False)
class SyncPrediction:
    """Weight sync of one plan."""

    PREFIX = "sync"

    shape: Architecture
    training: TrainingLayout
    rollout: RolloutLayout
    fabric: Fabric
    coefficients: SyncCoefficients
    weight_bytes: int
    """Bytes per element on the wire."""
    rollout_precision: Precision
    """fp8: bf16 is sent, and the engine quantises it."""
    lora_rank: int
    """Only adapters of this rank are sent; 0: all weights."""
    route: str
    """auto, or a pinned route."""
    bucket_bytes: int
    """Maximum chunk size."""

    direct, chain, tree = _route("direct"), _route("chain"), _route("tree")
    limits = made(Bounds, traffic="traffic", fabric="fabric", direct="direct")

    @line("bytes", "sum of the overlaps of training shards and engine ranks; padding is never sent")
    @part
    def replica_bytes(self) -> int:
        """Bytes that one engine receives."""
        return sum(flow.bytes for flow in flows(self.shape, self.training, self.rollout, self.weight_bytes,
                                                self.lora_rank))

    @line("bytes", "into GPUs whose rail has no holder of the shard, with the solved order of the engines' GPUs")
    @part
    def cross_rail_bytes(self) -> int:
        """Bytes into all rollout nodes that change rails, with the solved order."""
        return self.traffic.crossing_bytes()

    @line("bytes", "the same with the natural order of GPUs")
    @part
    def natural_cross_rail_bytes(self) -> int:
        """Bytes into all rollout nodes that change rails, with the natural order."""
        return self._traffic(solve_order=False).crossing_bytes()

    @line("s", lambda self: f"expected time of the chosen route, {self.chosen}")
    def seconds(self) -> float:
        return self.cost.expected_s

    @property
    def routes(self) -> dict[Kind, RouteCost]:
        return {"direct": self.direct, "chain": self.chain, "tree": self.tree}

    @part
    def traffic(self) -> Traffic:
        """The traffic, for `build`."""
        return self._traffic()

    def _traffic(self, solve_order: bool = True) -> Traffic:
        return traffic(self.shape, self.training, self.rollout, self.fabric, element_bytes=self.weight_bytes,
                       lora_rank=self.lora_rank, solve_order=solve_order)

    @part
    def chosen(self) -> Kind:
        return _pinned(self.route) if self.route != "auto" else least(
            {kind: cost.expected_s for kind, cost in self.routes.items()})

    @property
    def cost(self) -> RouteCost:
        return self.routes[self.chosen]

    @property
    def quantise(self) -> bool:
        """The engines quantise what they receive."""
        return self.rollout_precision == "fp8" and not self.lora_rank

    @property
    def floor_s(self) -> float:
        """Lower bound for any route."""
        return self.limits.floor

    @property
    def floor_by(self) -> str:
        """The binding bound: ingress, egress, source or nvlink."""
        return self.limits.binding

    @property
    def gpu_order(self) -> tuple[int, ...]:
        """GPUs of a node's engine ranks (`CUDA_VISIBLE_DEVICES`)."""
        return self.traffic.order

    @property
    def wire_precision(self) -> str:
        return {1: "fp8", 2: "bf16", 4: "fp32"}.get(self.weight_bytes, f"{self.weight_bytes} bytes")

    @property
    def reason(self) -> str:
        """One sentence with the numbers behind the choice."""
        cost, direct, limits = self.cost, self.direct, self.limits
        others = ", ".join(f"{kind} {each.expected_s:.2f} s"
                           for kind, each in self.routes.items() if kind != self.chosen)
        if self.route != "auto":
            return f"pinned: {self.chosen} {cost.expected_s:.2f} s against {others}"
        if self.chosen == "direct":
            why = (f"training NICs send {direct.trainer_nic_out_bytes / 1e9:.1f} GB while rollout NICs receive "
                   f"{direct.rollout_nic_in_bytes / 1e9:.1f} GB, so no receiver needs to forward")
            if direct.trainer_nic_out_bytes > direct.rollout_nic_in_bytes:
                why = "forwarding would cost more time than it saves"
        else:
            why = (f"a training NIC sends {cost.trainer_nic_out_bytes / 1e9:.1f} GB instead of "
                   f"{direct.trainer_nic_out_bytes / 1e9:.1f} GB with direct, and the {self.traffic.rollout_nodes} "
                   f"rollout nodes forward the rest, {cost.hops} hops")
        floor = f"floor {limits.floor:.2f} s by {limits.binding}"
        return f"{self.chosen} {cost.expected_s:.2f} s against {others}; {why} ({floor})"

    @property
    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.quantise:
            notes.append("bf16 is sent and each engine quantises it to FP8, so an FP8 rollout saves no bytes")
        if self.lora_rank:
            notes.append(f"only LoRA adapters of rank {self.lora_rank} are sent, whole to every engine rank")
        before, after = self.natural_cross_rail_bytes, self.cross_rail_bytes
        if before != after:
            notes.append(f"engine GPU order {','.join(map(str, self.gpu_order))}: {after / 1e9:.1f} GB change rails "
                         f"({before / 1e9:.1f} GB in natural order)")
        return tuple(notes)

    def build(self, kind: Kind | None = None) -> Route:
        """The edges of a route (default: the chosen one)."""
        kind = kind or self.chosen
        return build(self.traffic, kind, self.routes[kind].chunk_bytes)

    def communicators(self, coefficients: SyncCoefficients = DEFAULT, kind: Kind | None = None) -> Communicators:
        """Communicators on a GPU and their memory (default: of the chosen route)."""
        return communicators(self.build(kind), coefficients)

    def simulate(self, coefficients: SyncCoefficients = DEFAULT, kind: Kind | None = None) -> Simulation:
        """Simulate a route chunk by chunk (default: the chosen one)."""
        return simulate(self.build(kind), coefficients, quantise=self.quantise,
                        trainer_digested_bytes=self.cost.trainer_digested_bytes)


def predict(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, cluster: ClusterSpec,
            coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2, rollout_precision: Precision = "bf16",
            lora_rank: int = 0, route: str = "auto", bucket_bytes: int = DEFAULT_BUCKET,
            fabric: Fabric | None = None) -> SyncPrediction:
    """Times of all routes, and the choice.

    Args:
        fabric: default: that of `cluster`, with nodes in its order.
    """
    found = SyncPrediction(shape, training, rollout, fabric or fabric_of(cluster), coefficients, weight_bytes,
                           rollout_precision, lora_rank, route, bucket_bytes)
    if route != "auto":
        _pinned(route)
    return found


def fastest(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
            coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2, rollout_precision: Precision = "bf16",
            lora_rank: int = 0, bucket_bytes: int = DEFAULT_BUCKET) -> tuple[Kind, float]:
    """(route, expected seconds) that `predict` would choose, in a few 100 us, for a search."""
    moved = traffic(shape, training, rollout, fabric, element_bytes=weight_bytes, lora_rank=lora_rank)
    quantise = rollout_precision == "fp8" and not lora_rank
    seconds = {kind: RouteCost(kind, moved, fabric, coefficients, bucket_bytes, quantise).expected_s for kind in KINDS}
    chosen = least(seconds)
    return chosen, seconds[chosen]


def least_seconds(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
                  coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2,
                  rollout_precision: Precision = "bf16", lora_rank: int = 0,
                  bucket_bytes: int = DEFAULT_BUCKET) -> float:
    """Lower bound of `fastest` over all numbers of trainers (DP, CP) and engines, for a search. It assumes enough
    senders on every rail, so that no receiver forwards and the busiest NIC is a receiver's. It equals `fastest` if
    there are enough senders."""
    if fabric.nics_per_node < fabric.gpus_per_node:     # the GPUs that share a NIC depend on the engines' order
        return coefficients.pause_s + coefficients.barrier_s
    each = max(1, fabric.gpus_per_node // (rollout.tp * rollout.pp))
    full = replace(rollout, replicas=min(rollout.replicas, each))
    moved = traffic(shape, training, full, fabric, element_bytes=weight_bytes, lora_rank=lora_rank)
    found = _EnoughSenders("direct", moved, fabric, coefficients, bucket_bytes,
                           rollout_precision == "fp8" and not lora_rank)
    # A route with relays has smaller chunks: it packs the first and last chunk sooner, pays the latency more often, and
    # forwards at least one chunk.
    nvlink_rate = fabric.nvlink_bandwidth * coefficients.nvlink_efficiency
    rate, latency = fabric.nic_bandwidth * coefficients.nic_efficiency, coefficients.chunk_latency_s
    sooner = 2 / coefficients.copy_rate + (1 / nvlink_rate if found.nvlink_bytes else 0.0)
    if found.nvlink_bytes and found.wire_s < (found.nvlink_bytes + found.chunk_bytes) / nvlink_rate:
        return found.expected_s - found.chunk_bytes * sooner
    chunk = min(bucket_bytes, max(1.0, sqrt(found.busiest * latency / (1 / rate + sooner))))
    direct = found.busiest / found.chunk_bytes * latency + found.chunk_bytes * sooner
    relayed = found.busiest / chunk * latency + chunk * (1 / rate + sooner) + latency
    return found.expected_s - max(0.0, direct - relayed)


class _EnoughSenders(RouteCost):
    """A route whose training NICs are not a limit."""

    egress = 0.0


def least(seconds: Mapping[Kind, float]) -> Kind:
    """The simplest route whose time is within `TIE` of the fastest."""
    best = min(seconds.values())
    return next(kind for kind in KINDS if seconds[kind] <= best * (1 + TIE))


def _pinned(route: str) -> Kind:
    for kind in KINDS:
        if kind == route:
            return kind
    raise ValueError(f"route {route!r} is not one of auto, {', '.join(KINDS)}")
