"""Shards and workers put on nodes: which GPUs hold a shard, through which GPU a rollout node takes which bytes, and
how many senders share the receivers.

Nodes are numbered as the plan sees them: training nodes first, then rollout nodes; the placement gives them names.
A rollout node takes each byte that its engines need once over its NICs. Where several of its GPUs hold the same
engine rank (twins: replicas that share the node), each takes an equal part and passes it on over NVLink.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from launch.cluster.spec import ClusterSpec
from launch.fabric.gpu_order import engine_gpu_order
from launch.fabric.shards import Flow, Shard, Worker, flows, share
from launch.model.architecture import Architecture
from launch.plan.book import made
from launch.plan.layouts import RolloutLayout, TrainingLayout


class Place(NamedTuple):
    """A GPU: its node and its index there."""

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class Fabric:
    """The network as routes see it."""

    gpus_per_node: int
    nics_per_node: int
    nic_bandwidth: float
    """bytes/s of one NIC in one direction."""
    nvlink_bandwidth: float
    """bytes/s of one GPU in one direction."""
    rails: int
    """Rails that traffic should stay on: one a NIC, or 1 where the fabric is not rail-optimised."""
    leaf_of_node: tuple[int, ...] = ()
    """Leaf switch of each node, by the plan's numbers; () puts all under one leaf (one rail group)."""
    spine_bandwidth: float = 0.0
    """bytes/s out of one leaf; 0: not oversubscribed."""

    def nic(self, gpu: int) -> int:
        """The NIC of a GPU."""
        return gpu * self.nics_per_node // self.gpus_per_node

    def rail(self, gpu: int) -> int:
        return gpu * self.rails // self.gpus_per_node

    def leaf(self, node: int) -> int:
        return self.leaf_of_node[node] if node < len(self.leaf_of_node) else 0


def fabric_of(cluster: ClusterSpec, nodes: Sequence[str] | None = None, spine_bandwidth: float = 0.0) -> Fabric:
    """`nodes`: names in the plan's order, training first (default: the cluster's order)."""
    return ClusterFabric(cluster, nodes, spine_bandwidth).fabric


@dataclass(eq=False)
class ClusterFabric:
    """What the network of a cluster is to routes, number by number; see `fabric_of`."""

    cluster: ClusterSpec
    names: Sequence[str] | None = None
    spine_bandwidth: float = 0.0

    fabric = made(Fabric, gpus_per_node="cluster.gpus_per_node", nics_per_node="nics", nic_bandwidth="nic_bandwidth",
                  nvlink_bandwidth="cluster.gpu.nvlink_bandwidth", rails="rails", leaf_of_node="leaves",
                  spine_bandwidth="spine_bandwidth")

    @property
    def nics(self) -> int:
        return min(self.cluster.nics_per_node, self.cluster.gpus_per_node)

    @property
    def nic_bandwidth(self) -> float:
        """A GPU with two NICs has one of twice the rate."""
        return self.cluster.nic_bandwidth * self.cluster.nics_per_node / self.nics

    @property
    def rails(self) -> int:
        return min(self.cluster.rails, self.nics)

    @property
    def leaves(self) -> tuple[int, ...]:
        leaf_of = leaf_of_nodes(self.cluster)
        leaves = tuple(leaf_of.get(node, 0) for node in self.names or self.cluster.nodes)
        return leaves if any(leaves) else ()


def leaf_of_nodes(cluster: ClusterSpec) -> dict[str, int]:
    """The number of the leaf switch of each node that hangs on one."""
    return {node: number for number, switch in enumerate(each for each in cluster.switches if each.nodes)
            for node in switch.nodes}


class Piece(NamedTuple):
    """Bytes that a rollout node takes in through one of its GPUs: part of a flow."""

    shard: Shard
    worker: Worker
    gpu: int
    first_byte: int
    """Where the piece begins in the flow's bytes."""
    bytes: int
    copies: tuple[int, ...]
    """Twin GPUs of the node that get it over NVLink."""


class NodeKind(NamedTuple):
    """Rollout nodes that hold the same engine ranks on the same GPUs."""

    pieces: tuple[Piece, ...]
    nodes: tuple[int, ...]
    ingress: tuple[int, ...]
    """Bytes into each NIC of such a node."""
    egress_per_copy: dict[tuple[Shard, int], int]
    """(shard, rail of the receiving GPU) -> bytes of one copy."""
    twin_bytes: int
    """Most bytes into one GPU over NVLink."""


class ShardDemand(NamedTuple):
    """One copy of what a rollout node takes from a shard on one rail."""

    shard: Shard
    rail: int
    bytes: int
    senders: int
    aligned: bool


class Senders(NamedTuple):
    """Who sends a shard to receivers on one rail."""

    number: int
    aligned: bool
    """On the receivers' rail; else every holder of the shard sends, across rails."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that is to move, whatever the route."""

    fabric: Fabric
    training: TrainingLayout
    kinds: tuple[NodeKind, ...]
    demands: tuple[tuple[ShardDemand, ...], ...]
    """Of a node of each kind."""
    order: tuple[int, ...]
    """GPUs of the engines' ranks (see `gpu_order`)."""
    replica_bytes: int
    """Bytes that one engine takes."""
    senders_limit: int
    """Most holders of a shard that may send; 0: all."""
    seats: tuple[Place | None, ...] = ()
    """GPU of each training rank, None for one that does not send; (): rank after rank, node by node."""

    @property
    def rollout_nodes(self) -> int:
        return sum(len(kind.nodes) for kind in self.kinds)

    def senders(self, shard: Shard, rail: int) -> Senders:
        """Holders of `shard` on `rail`, or all of them where there is none."""
        return _senders(self.training, self.fabric, shard, rail, self.senders_limit, self.seats)

    def sender_places(self, shard: Shard, rail: int) -> tuple[Place, ...]:
        """Where these senders are, in rank order."""
        places = holders(self.training, shard, self.fabric.gpus_per_node, self.senders_limit, self.seats)
        aligned = tuple(place for place in places if self.fabric.rail(place.gpu) == rail)
        return aligned or places

    def crossing_bytes(self) -> int:
        """Bytes into one rollout node of each kind that change rails, all nodes together."""
        return sum(demand.bytes * len(kind.nodes) for kind, demands in zip(self.kinds, self.demands, strict=True)
                   for demand in demands if not demand.aligned)


def traffic(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric, *,
            element_bytes: int = 2, lora_rank: int = 0, senders_limit: int = 0, solve_order: bool = True) -> Traffic:
    """What must move from a training to a rollout partition, put on nodes.

    Args:
        senders_limit: most DP x CP holders of a shard that may send (0: all).
        solve_order: the engines' GPU order from `gpu_order`; False: the natural order.
    """
    gpus = fabric.gpus_per_node
    order = engine_gpu_order(training, rollout.tp, rollout_pp=rollout.pp, gpus_per_node=gpus,
                             rails=fabric.rails) if solve_order else ()
    moved = flows(shape, training, rollout, element_bytes, lora_rank)
    kinds = _kinds(moved, rollout.tp, rollout.pp, rollout.replicas, -(-training.gpus // gpus), order, gpus,
                   fabric.nics_per_node, fabric.rails)
    return assemble(fabric, training, kinds, order, _total(moved), senders_limit)


def assemble(fabric: Fabric, training: TrainingLayout, kinds: tuple[NodeKind, ...], order: tuple[int, ...],
             replica_bytes: int, senders_limit: int = 0, seats: tuple[Place | None, ...] = ()) -> Traffic:
    """Node kinds with the senders of what they take."""
    demands = tuple(tuple(
        ShardDemand(shard, rail, size, *_senders(training, fabric, shard, rail, senders_limit, seats))
        for (shard, rail), size in kind.egress_per_copy.items()) for kind in kinds)
    return Traffic(fabric, training, kinds, demands, order, replica_bytes, senders_limit, seats)


def _senders(training: TrainingLayout, fabric: Fabric, shard: Shard, rail: int, limit: int,
             seats: tuple[Place | None, ...]) -> Senders:
    if seats:
        places = holders(training, shard, fabric.gpus_per_node, limit, seats)
        counts = tuple(sum(fabric.rail(place.gpu) == each for place in places) for each in range(fabric.rails))
    else:
        counts = _holder_counts(training.tp, training.cp * training.dp, training.ep, training.etp, shard,
                                fabric.gpus_per_node, fabric.rails, limit)
    return Senders(counts[rail], True) if counts[rail] else Senders(sum(counts), False)


@lru_cache(maxsize=1024)
def _total(moved: tuple[Flow, ...]) -> int:
    return sum(flow.bytes for flow in moved)


def holders(training: TrainingLayout, shard: Shard, gpus_per_node: int, limit: int = 0,
            seats: Sequence[Place | None] = ()) -> tuple[Place, ...]:
    """GPUs that hold a shard, in rank order. rank = tp + TP (cp + CP (dp + DP pp)); inside a stage, routed
    experts follow the order (expert TP, EP, the rest). `seats`: see `Traffic`."""
    stage_ranks = training.tp * training.cp * training.dp
    first, step = _first_and_step(shard, training.tp, training.ep, training.etp)
    ranks = range(shard.pp * stage_ranks + first, (shard.pp + 1) * stage_ranks, step)
    if seats:
        places = tuple(place for place in (seats[rank] for rank in ranks) if place is not None)
        return places[:limit] if limit else places
    return tuple(Place(*divmod(rank, gpus_per_node)) for rank in (ranks[:limit] if limit else ranks))


def _first_and_step(shard: Shard, tp: int, ep: int, etp: int) -> tuple[int, int]:
    """Of the ranks of a stage that hold a shard: the first, and the distance to the next."""
    return (shard.tp + etp * shard.ep, etp * ep) if shard.routed else (shard.tp, tp)


@lru_cache(maxsize=65536)
def _holder_counts(tp: int, replicas: int, ep: int, etp: int, shard: Shard, gpus: int, rails: int,
                   limit: int) -> tuple[int, ...]:
    """Holders of a shard on each rail."""
    first, step = _first_and_step(shard, tp, ep, etp)
    number = tp * replicas // step
    counts = [0] * rails
    for index in range(min(number, limit) if limit else number):
        counts[(shard.pp * tp * replicas + first + step * index) % gpus * rails // gpus] += 1
    return tuple(counts)


def engine_gpus(rollout_tp: int, rollout_pp: int, replica: int, order: Sequence[int],
                gpus_per_node: int) -> tuple[Place, ...]:
    """GPUs of a replica's ranks, in the order of (PP, TP); nodes counted from the first rollout node."""
    size = rollout_tp * rollout_pp
    if size > gpus_per_node:
        spans = -(-size // gpus_per_node)
        return tuple(Place(replica * spans + rank // gpus_per_node, order[rank] if order else rank % gpus_per_node)
                     for rank in range(size))
    each = gpus_per_node // size
    node, slot = divmod(replica, each)
    return tuple(Place(node, order[slot * size + rank] if order else slot * size + rank) for rank in range(size))


@lru_cache(maxsize=512)
def _kinds(moved: tuple[Flow, ...], tp: int, pp: int, replicas: int, first_node: int, order: tuple[int, ...],
           gpus: int, nics: int, rails: int) -> tuple[NodeKind, ...]:
    size = tp * pp
    each, spans = max(1, gpus // size), -(-size // gpus)
    if spans > 1:
        ranks = [(tuple(range(gpus * part, min(size, gpus * (part + 1)))),
                  tuple(first_node + spans * replica + part for replica in range(replicas))) for part in range(spans)]
    else:
        full, left = divmod(replicas, each)
        ranks = [(tuple(range(size * each)), tuple(range(first_node, first_node + full))),
                 (tuple(range(size * left)), (first_node + full,))]
    kinds = []
    for held, nodes in ranks:
        if held and nodes:
            workers = tuple((Worker(rank % size // tp, rank % tp), order[rank] if order else number)
                            for number, rank in enumerate(held))
            kinds.append(node_kind(moved, workers, nodes, gpus, nics, rails))
    return tuple(kinds)


def node_kind(moved: tuple[Flow, ...], workers: tuple[tuple[Worker, int], ...], nodes: tuple[int, ...], gpus: int,
              nics: int, rails: int) -> NodeKind:
    """The nodes that hold `workers`: (engine rank, GPU of the node), twins in the order of their replicas."""
    pieces, twin_bytes = _pieces(moved, workers)
    ingress, egress = [0] * nics, defaultdict[tuple[Shard, int], int](int)
    for piece in pieces:
        ingress[piece.gpu * nics // gpus] += piece.bytes
        egress[piece.shard, piece.gpu * rails // gpus] += piece.bytes
    return NodeKind(pieces, nodes, tuple(ingress), dict(egress), twin_bytes)


@lru_cache(maxsize=1024)
def _pieces(moved: tuple[Flow, ...],
            workers: tuple[tuple[Worker, int], ...]) -> tuple[tuple[Piece, ...], int]:
    """Pieces of a node that holds `workers`, and most bytes into one GPU over NVLink.

    Twins cut what each training stage sends at equal bytes, dense tensors and experts apart, shards in order: twin i
    of k takes the i-th part (the order of GPUs counts on that).
    """
    gpus_of: dict[Worker, list[int]] = defaultdict(list)
    for worker, gpu in workers:
        gpus_of[worker].append(gpu)
    groups: dict[tuple[Worker, int, bool], list[Flow]] = defaultdict(list)
    for flow in moved:
        groups[flow.worker, flow.shard.pp, flow.shard.routed].append(flow)
    pieces, nvlink = [], defaultdict[int, int](int)
    for (worker, _, _), members in sorted(groups.items()):
        gpus, total, start = gpus_of[worker], sum(flow.bytes for flow in members), 0
        if not gpus:
            continue
        for flow in members:
            for number, gpu in enumerate(gpus):
                first, last = share(total, len(gpus), number)
                low, high = max(start, first), min(start + flow.bytes, last)
                if high > low:
                    copies = tuple(other for other in gpus if other != gpu)
                    pieces.append(Piece(flow.shard, worker, gpu, low - start, high - low, copies))
                    for other in copies:
                        nvlink[other] += high - low
            start += flow.bytes
    return tuple(pieces), max(nvlink.values(), default=0)
