"""Shards and workers on nodes: the GPUs that hold a shard, the GPU that receives each piece on a rollout node, and the
number of senders for the receivers.

Nodes have the plan's numbers: training nodes first, then rollout nodes. The placement gives them names. A rollout node
receives each byte that its engines need once over its NICs. If several of its GPUs hold the same engine rank (twins:
replicas on one node), each receives an equal part and forwards it over NVLink.
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
    """The network for routes."""

    gpus_per_node: int
    nics_per_node: int
    nic_bandwidth: float
    """bytes/s of one NIC in one direction."""
    nvlink_bandwidth: float
    """bytes/s of one GPU in one direction."""
    rails: int
    """Rails that traffic should stay on: one per NIC, or 1 if the fabric is not rail-optimised."""
    leaf_of_node: tuple[int, ...] = ()
    """Leaf switch of each node, by the plan's numbers; (): all nodes are under one leaf (one rail group)."""

    def nic(self, gpu: int) -> int:
        """The NIC of a GPU."""
        return gpu * self.nics_per_node // self.gpus_per_node

    def rail(self, gpu: int) -> int:
        return gpu * self.rails // self.gpus_per_node

    def leaf(self, node: int) -> int:
        return self.leaf_of_node[node] if node < len(self.leaf_of_node) else 0


def fabric_of(cluster: ClusterSpec) -> Fabric:
    """The network of a cluster, with nodes in its order."""
    return ClusterFabric(cluster).fabric


@dataclass(eq=False)
class ClusterFabric:
    """The numbers of `fabric_of`, one by one for the book."""

    cluster: ClusterSpec

    fabric = made(Fabric, gpus_per_node="cluster.gpus_per_node", nics_per_node="nics", nic_bandwidth="nic_bandwidth",
                  nvlink_bandwidth="cluster.gpu.nvlink_bandwidth", rails="rails", leaf_of_node="leaves")

    @property
    def nics(self) -> int:
        return min(self.cluster.nics_per_node, self.cluster.gpus_per_node)

    @property
    def nic_bandwidth(self) -> float:
        """bytes/s. Two NICs of one GPU count as one with twice the rate."""
        return self.cluster.nic_bandwidth * self.cluster.nics_per_node / self.nics

    @property
    def rails(self) -> int:
        return min(self.cluster.rails, self.nics)

    @property
    def leaves(self) -> tuple[int, ...]:
        leaf_of = leaf_of_nodes(self.cluster)
        leaves = tuple(leaf_of.get(node, 0) for node in self.cluster.nodes)
        return leaves if any(leaves) else ()


def leaf_of_nodes(cluster: ClusterSpec) -> dict[str, int]:
    """Node -> number of its leaf switch, for nodes with one."""
    return {node: number for number, switch in enumerate(each for each in cluster.switches if each.nodes)
            for node in switch.nodes}


class Piece(NamedTuple):
    """Bytes into a rollout node through one of its GPUs: part of a flow."""

    shard: Shard
    worker: Worker
    gpu: int
    first_byte: int
    """Offset of the piece in the flow."""
    bytes: int
    copies: tuple[int, ...]
    """Twin GPUs of the node that receive the piece over NVLink."""


class NodeKind(NamedTuple):
    """Rollout nodes that hold the same engine ranks on the same GPUs."""

    pieces: tuple[Piece, ...]
    nodes: tuple[int, ...]
    ingress: tuple[int, ...]
    """Bytes into each NIC of such a node."""
    egress_per_copy: dict[tuple[Shard, int], int]
    """(shard, rail of the receiving GPU) -> bytes of one copy."""
    twin_bytes: int
    """Bytes into the busiest GPU over NVLink."""


class ShardDemand(NamedTuple):
    """One copy of the bytes that a rollout node receives from a shard on one rail."""

    shard: Shard
    rail: int
    bytes: int
    senders: int
    aligned: bool


class Senders(NamedTuple):
    """Senders of a shard to receivers on one rail."""

    number: int
    aligned: bool
    """Whether they are on the receivers' rail. Otherwise all holders of the shard send, across rails."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes to move, independent of the route."""

    fabric: Fabric
    training: TrainingLayout
    kinds: tuple[NodeKind, ...]
    demands: tuple[tuple[ShardDemand, ...], ...]
    """Demands of a node of each kind."""
    order: tuple[int, ...]
    """GPUs of the engines' ranks, see `gpu_order`."""
    replica_bytes: int
    """Bytes that one engine receives."""
    seats: tuple[Place | None, ...] = ()
    """GPU of each training rank, None for a rank that does not send; (): ranks in order, node by node."""

    @property
    def rollout_nodes(self) -> int:
        return sum(len(kind.nodes) for kind in self.kinds)

    def sender_places(self, shard: Shard, rail: int) -> tuple[Place, ...]:
        """GPUs of the holders of `shard` on `rail`, or of all holders if there are none, in rank order."""
        places = holders(self.training, shard, self.fabric.gpus_per_node, self.seats)
        aligned = tuple(place for place in places if self.fabric.rail(place.gpu) == rail)
        return aligned or places

    def crossing_bytes(self) -> int:
        """Bytes into all rollout nodes that change rails."""
        return sum(demand.bytes * len(kind.nodes) for kind, demands in zip(self.kinds, self.demands, strict=True)
                   for demand in demands if not demand.aligned)


def traffic(shape: Architecture, training: TrainingLayout, rollout: RolloutLayout, fabric: Fabric, *,
            element_bytes: int = 2, lora_rank: int = 0, solve_order: bool = True) -> Traffic:
    """The traffic from a training to a rollout partition.

    Args:
        solve_order: use the GPU order from `gpu_order` for engines; False: the natural order.
    """
    gpus = fabric.gpus_per_node
    order = engine_gpu_order(training, rollout.tp, rollout_pp=rollout.pp, gpus_per_node=gpus,
                             rails=fabric.rails) if solve_order else ()
    moved = flows(shape, training, rollout, element_bytes, lora_rank)
    kinds = _kinds(moved, rollout.tp, rollout.pp, rollout.replicas, -(-training.gpus // gpus), order, gpus,
                   fabric.nics_per_node, fabric.rails)
    return assemble(fabric, training, kinds, order, _total(moved))


def assemble(fabric: Fabric, training: TrainingLayout, kinds: tuple[NodeKind, ...], order: tuple[int, ...],
             replica_bytes: int, seats: tuple[Place | None, ...] = ()) -> Traffic:
    """The traffic into these kinds of nodes, with its senders."""
    demands = tuple(tuple(
        ShardDemand(shard, rail, size, *_senders(training, fabric, shard, rail, seats))
        for (shard, rail), size in kind.egress_per_copy.items()) for kind in kinds)
    return Traffic(fabric, training, kinds, demands, order, replica_bytes, seats)


def _senders(training: TrainingLayout, fabric: Fabric, shard: Shard, rail: int,
             seats: tuple[Place | None, ...]) -> Senders:
    if seats:
        places = holders(training, shard, fabric.gpus_per_node, seats)
        counts = tuple(sum(fabric.rail(place.gpu) == each for place in places) for each in range(fabric.rails))
    else:
        counts = _holder_counts(training.tp, training.cp * training.dp, training.ep, training.etp, shard,
                                fabric.gpus_per_node, fabric.rails)
    return Senders(counts[rail], True) if counts[rail] else Senders(sum(counts), False)


@lru_cache(maxsize=1024)
def _total(moved: tuple[Flow, ...]) -> int:
    return sum(flow.bytes for flow in moved)


def holders(training: TrainingLayout, shard: Shard, gpus_per_node: int,
            seats: Sequence[Place | None] = ()) -> tuple[Place, ...]:
    """GPUs that hold a shard, in rank order. rank = tp + TP (cp + CP (dp + DP pp)). Inside a stage, routed experts are
    in the order (expert TP, EP, the rest). `seats`: see `Traffic`."""
    stage_ranks = training.tp * training.cp * training.dp
    first, step = _first_and_step(shard, training.tp, training.ep, training.etp)
    ranks = range(shard.pp * stage_ranks + first, (shard.pp + 1) * stage_ranks, step)
    if seats:
        return tuple(place for place in (seats[rank] for rank in ranks) if place is not None)
    return tuple(Place(*divmod(rank, gpus_per_node)) for rank in ranks)


def _first_and_step(shard: Shard, tp: int, ep: int, etp: int) -> tuple[int, int]:
    """First rank of a stage that holds a shard, and the distance to the next one."""
    return (shard.tp + etp * shard.ep, etp * ep) if shard.routed else (shard.tp, tp)


@lru_cache(maxsize=65536)
def _holder_counts(tp: int, replicas: int, ep: int, etp: int, shard: Shard, gpus: int, rails: int) -> tuple[int, ...]:
    """Number of holders of a shard on each rail."""
    first, step = _first_and_step(shard, tp, ep, etp)
    counts = [0] * rails
    for index in range(tp * replicas // step):
        counts[(shard.pp * tp * replicas + first + step * index) % gpus * rails // gpus] += 1
    return tuple(counts)


def engine_gpus(rollout_tp: int, rollout_pp: int, replica: int, order: Sequence[int],
                gpus_per_node: int) -> tuple[Place, ...]:
    """GPUs of a replica's ranks, in the order of (PP, TP). Nodes are counted from the first rollout node."""
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
    """The kind of the nodes that hold `workers`: (engine rank, GPU of the node), twins in the order of replicas."""
    pieces, twin_bytes = _pieces(moved, workers)
    ingress, egress = [0] * nics, defaultdict[tuple[Shard, int], int](int)
    for piece in pieces:
        ingress[piece.gpu * nics // gpus] += piece.bytes
        egress[piece.shard, piece.gpu * rails // gpus] += piece.bytes
    return NodeKind(pieces, nodes, tuple(ingress), dict(egress), twin_bytes)


@lru_cache(maxsize=1024)
def _pieces(moved: tuple[Flow, ...],
            workers: tuple[tuple[Worker, int], ...]) -> tuple[tuple[Piece, ...], int]:
    """Pieces of a node that holds `workers`, and the bytes into its busiest GPU over NVLink.

    Twins divide the bytes from each training stage equally, dense tensors and experts separately, with shards in order:
    twin i of k receives the i-th part. `gpu_order` depends on this.
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
