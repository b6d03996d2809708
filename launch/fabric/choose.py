"""Compares the three routes and chooses one.

A route costs the time of a sync, and communicators: memory that they hold on the GPUs for the whole run, and seconds to
open them at every start. Both grow with their number. The choice, among routes that a run can open (`MOST_LINKS`):

1. the fastest, and all routes that the prediction cannot tell from it: their time is within the range of its prediction
   (`SyncCoefficients.uncertainty`);
2. of these, the one with the fewest communicators;
3. then the one with the fewest bytes out of the training NICs. Trainers are free once their bytes have left, because
   weights change only at the next optimizer step;
4. then the simplest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

from launch.cluster.spec import ClusterSpec
from launch.coefficients.sync import DEFAULT, SyncCoefficients
from launch.fabric.bounds import Bounds
from launch.fabric.communicators import MOST_LINKS, Communicators
from launch.fabric.estimate import DEFAULT_BUCKET, KINDS, Kind, RouteCost
from launch.fabric.lanes import Fabric, Traffic, fabric_of, traffic
from launch.fabric.routes import Route, build, links
from launch.fabric.shards import flows
from launch.fabric.simulate import Simulation, simulate
from launch.fabric.staging import Staging, staging
from launch.model.architecture import Architecture
from launch.plan.book import line, made, part
from launch.plan.layouts import Precision, RolloutLayout, TrainingLayout


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
    most_links: int = MOST_LINKS
    """Communicators that one GPU may have. Connections of CPUs have no such limit."""

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
    def needs(self) -> dict[Kind, Communicators]:
        """Communicators of each route."""
        return {kind: self._needs(kind) for kind in KINDS}

    def _needs(self, kind: Kind) -> Communicators:
        return Communicators(links(self.traffic, kind), self.coefficients)

    @property
    def usable(self) -> tuple[Kind, ...]:
        """The routes that a run can open: no GPU has more communicators than it can use."""
        return tuple(kind for kind in KINDS if self.needs[kind].busiest <= self.most_links)

    @property
    def alike(self) -> tuple[Kind, ...]:
        """Of the usable routes: the fastest, and those that the prediction cannot tell from it."""
        best = min((self.routes[kind].expected_s for kind in self.usable), default=0.0)
        return tuple(kind for kind in self.usable
                     if self.routes[kind].expected_s <= best * self.coefficients.uncertainty)

    @part
    def chosen(self) -> Kind:
        """The pinned route, or the preferred one. If none is usable, the one with the fewest communicators on a GPU,
        which `launch.planner.planning` refuses."""
        if self.route != "auto":
            return _pinned(self.route)
        found = preferred(self.routes, self._needs, self.coefficients, self.most_links)
        return min(KINDS, key=lambda kind: self.needs[kind].busiest) if found is None else found

    @part
    def staging(self) -> dict[Kind, Staging]:
        """The buffers of each route."""
        return {kind: staging(self.build(kind)) for kind in KINDS}

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
        """The numbers behind the choice."""
        chosen, needs = self.chosen, self.needs
        others = [kind for kind in KINDS if kind != chosen]
        times = ", ".join(f"{kind} {self.routes[kind].expected_s:.2f} s" for kind in others)
        floor = f"floor {self.limits.floor:.2f} s by {self.limits.binding}"
        if self.route != "auto":
            return f"pinned: {chosen} {self.cost.expected_s:.2f} s against {times} ({floor})"
        if all(cost.hops == 1 for cost in self.routes.values()):
            return f"{chosen} {self.cost.expected_s:.2f} s: no node forwards, so all routes are the same ({floor})"
        why = []
        refused = [kind for kind in others if kind not in self.usable]
        if refused:
            why.append(f"{_listed(refused)} would have {_numbers(str(needs[kind].busiest) for kind in refused)} "
                       f"communicators on a GPU, which can use {self.most_links}")
        slower = [kind for kind in others if kind in self.usable and kind not in self.alike]
        if slower:
            why.append(f"{_listed(slower)} {'is' if len(slower) == 1 else 'are'} slower beyond the prediction's range, "
                       f"a factor of {self.coefficients.uncertainty:g}")
        even = [kind for kind in others if kind in self.alike]
        if even:
            why.append(f"{_listed(even)} {'is' if len(even) == 1 else 'are'} as fast within the prediction's range, a "
                       f"factor of {self.coefficients.uncertainty:g}, and {self._better_than(even)}")
        return f"{chosen} {self.cost.expected_s:.2f} s against {times}: {'; '.join(why)} ({floor})"

    def _better_than(self, others: Sequence[Kind]) -> str:
        """Why the chosen route is better than others that take as long."""
        mine, sent = self.needs[self.chosen], self.cost.sent_bytes
        counts = [self.needs[kind].total for kind in others]
        if mine.total < min(counts):
            against = _numbers(f"{count:,}" for count in counts)
            return f"{self.chosen} has the fewest communicators, {mine.total:,} against {against}"
        rivals = [kind for kind in others if self.needs[kind].total == mine.total]
        volumes = [self.routes[kind].sent_bytes for kind in rivals]
        if sent < min(volumes):
            return (f"none has fewer communicators, {mine.total:,}, and with {self.chosen} {sent / 1e9:,.1f} GB leave "
                    f"the training NICs, against {_numbers(f'{volume / 1e9:,.1f}' for volume in volumes)} GB with "
                    f"{_listed(rivals)}")
        return f"{self.chosen} is the simplest of those with {mine.total:,} communicators"

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

    def simulate(self, coefficients: SyncCoefficients = DEFAULT, kind: Kind | None = None) -> Simulation:
        """Simulate a route chunk by chunk (default: the chosen one)."""
        return simulate(self.build(kind), coefficients, quantise=self.quantise,
                        trainer_digested_bytes=self.cost.trainer_digested_bytes)


def predict(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, cluster: ClusterSpec,
            coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2, rollout_precision: Precision = "bf16",
            lora_rank: int = 0, route: str = "auto", bucket_bytes: int = DEFAULT_BUCKET,
            fabric: Fabric | None = None, most_links: int = MOST_LINKS) -> SyncPrediction:
    """Times of all routes, and the choice.

    Args:
        fabric: default: that of `cluster`, with nodes in its order.
    """
    found = SyncPrediction(shape, training, rollout, fabric or fabric_of(cluster), coefficients, weight_bytes,
                           rollout_precision, lora_rank, route, bucket_bytes, most_links)
    if route != "auto":
        _pinned(route)
    return found


def quickest(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
             coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2, rollout_precision: Precision = "bf16",
             lora_rank: int = 0, bucket_bytes: int = DEFAULT_BUCKET) -> float:
    """Expected seconds of the fastest route, in a few 100 us, for a search: a lower bound of `seconds_of_choice`."""
    return min(cost.expected_s for cost in _costs(
        traffic(shape, training, rollout, fabric, element_bytes=weight_bytes, lora_rank=lora_rank), fabric,
        coefficients, bucket_bytes, rollout_precision == "fp8" and not lora_rank).values())


def seconds_of_choice(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
                      coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2,
                      rollout_precision: Precision = "bf16", lora_rank: int = 0, bucket_bytes: int = DEFAULT_BUCKET,
                      most_links: int = MOST_LINKS) -> float | None:
    """Expected seconds of the route that `predict` would choose, in a few ms, for a search; None if a run can open no
    route."""
    moved = traffic(shape, training, rollout, fabric, element_bytes=weight_bytes, lora_rank=lora_rank)
    costs = _costs(moved, fabric, coefficients, bucket_bytes, rollout_precision == "fp8" and not lora_rank)
    chosen = preferred(costs, lambda kind: Communicators(links(moved, kind), coefficients), coefficients, most_links)
    return None if chosen is None else costs[chosen].expected_s


def _costs(moved: Traffic, fabric: Fabric, coefficients: SyncCoefficients, bucket_bytes: int,
           quantise: bool) -> dict[Kind, RouteCost]:
    return {kind: RouteCost(kind, moved, fabric, coefficients, bucket_bytes, quantise) for kind in KINDS}


def least_seconds(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric,
                  coefficients: SyncCoefficients = DEFAULT, *, weight_bytes: int = 2,
                  rollout_precision: Precision = "bf16", lora_rank: int = 0,
                  bucket_bytes: int = DEFAULT_BUCKET) -> float:
    """Lower bound of `quickest` over all numbers of trainers (DP, CP) and engines, for a search. It assumes enough
    senders on every rail, so that no receiver forwards and the busiest NIC is a receiver's. It equals `quickest` if
    there are enough senders."""
    if fabric.nics_per_node < fabric.gpus_per_node:     # the GPUs that share a NIC depend on the engines' order
        return coefficients.pause_s + coefficients.barrier_s
    each = max(1, fabric.gpus_per_node // (rollout.tp * rollout.pp))
    full = replace(rollout, replicas=min(rollout.replicas, each))
    moved = traffic(shape, training, full, fabric, element_bytes=weight_bytes, lora_rank=lora_rank)
    found = _EnoughSenders("direct", moved, fabric, coefficients, bucket_bytes,
                           rollout_precision == "fp8" and not lora_rank)
    # A route may have smaller chunks, for its staging or because it has relays: it packs the first and last chunk
    # sooner, pays the latency more often, and with relays forwards at least one chunk.
    nvlink_rate = fabric.nvlink_bandwidth * coefficients.nvlink_efficiency
    rate, latency = fabric.nic_bandwidth * coefficients.nic_efficiency, coefficients.chunk_latency_s
    sooner = 2 / coefficients.copy_rate + (1 / nvlink_rate if found.nvlink_bytes else 0.0)
    slow = False
    if found.quantise:
        sooner += 1 / coefficients.quantise_rate
        slow = found.wire_s < (found.rollout_nic_in_bytes + found.nvlink_bytes) / coefficients.quantise_rate
    if slow or found.nvlink_bytes and found.wire_s < (found.nvlink_bytes + found.chunk_bytes) / nvlink_rate:
        return found.expected_s - found.chunk_bytes * sooner
    def least(seconds_per_byte: float) -> float:
        """Seconds of chunks of the best size, of which one's bytes take so long."""
        chunk = min(bucket_bytes, max(1.0, sqrt(found.busiest * latency / seconds_per_byte)))
        return found.busiest / chunk * latency + chunk * seconds_per_byte

    direct = found.busiest / found.chunk_bytes * latency + found.chunk_bytes * sooner
    return found.expected_s - max(0.0, direct - least(1 / rate + sooner) - latency, direct - least(sooner))


class _EnoughSenders(RouteCost):
    """A route whose training NICs are not a limit."""

    egress = 0.0

    @property
    def most_chunk(self) -> int:
        return self.bucket_bytes


def preferred(costs: Mapping[Kind, RouteCost], needs: Callable[[Kind], Communicators], coefficients: SyncCoefficients,
              most_links: int) -> Kind | None:
    """The route to choose; None if a run can open none."""
    if all(cost.hops == 1 for cost in costs.values()):          # then nothing is forwarded, and all are the same
        costs = {"direct": costs["direct"]}
    within = float("inf")
    best: tuple[int, int, int] | None = None
    for kind in sorted(costs, key=lambda kind: costs[kind].expected_s):
        if costs[kind].expected_s > within:
            break
        found = needs(kind)
        if found.busiest <= most_links:
            within = min(within, costs[kind].expected_s * coefficients.uncertainty)
            mine = found.total, costs[kind].sent_bytes, KINDS.index(kind)
            best = min(best or mine, mine)
    return KINDS[best[-1]] if best else None


def _listed(kinds: Sequence[Kind]) -> str:
    return " and ".join(kinds)


def _numbers(numbers: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(numbers))


def _pinned(route: str) -> Kind:
    for kind in KINDS:
        if kind == route:
            return kind
    raise ValueError(f"route {route!r} is not one of auto, {', '.join(KINDS)}")
