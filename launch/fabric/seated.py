"""Traffic of a placed run. Seats come from the placement and the members that are still alive, flows from the layouts
that both sides describe. With the seats and flows of the plan, the traffic equals the plan's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.fabric.lanes import Fabric, Place, Traffic, assemble, node_kind
from launch.fabric.shards import Flow, Worker
from launch.plan.forecast import ClusterFacts
from launch.plan.layouts import TrainingLayout
from launch.plan.plan import Placement

EngineRank = tuple[int, int]
"""(replica, worker)."""


@dataclass(frozen=True)
class Seats:
    """GPUs of the members of a sync, and the network between them."""

    fabric: Fabric
    training: tuple[Place, ...]
    """By rank."""
    rollout: Mapping[EngineRank, Place]


def seats_of(placement: Placement, engine_size: int, cluster: ClusterFacts | None = None) -> Seats:
    """The seats of a placement; training nodes come first. Without GPUs, every process of a node has its own seat, and
    all share the node's network card.

    Args:
        engine_size: ranks of an engine.
        cluster: facts about the nodes from the plan.
    """
    numbers: dict[str, int] = {}
    taken: dict[str, int] = defaultdict(int)

    def seat(node: str, gpu: int | None) -> Place:
        number = numbers.setdefault(node, len(numbers))
        taken[node] += 1
        return Place(number, taken[node] - 1 if gpu is None else gpu)

    training = tuple(seat(rank.node, rank.gpu) for rank in sorted(placement.training, key=lambda rank: rank.rank))
    rollout = {(engine.replica, worker): seat(engine.nodes[worker] if engine.nodes else engine.node,
                                              engine.gpus[worker] if engine.gpus else None)
               for engine in placement.rollout for worker in range(engine_size)}
    on_gpus = any(rank.gpu is not None for rank in placement.training)
    most = 1 + max(place.gpu for place in (*training, *rollout.values()))
    leaves = tuple(placement.leaves.get(node, 0) for node in numbers)
    if cluster is None or not on_gpus:
        return Seats(replace(one_card(most), leaf_of_node=leaves), training, rollout)
    nics = min(cluster.nics_per_node, cluster.gpus_per_node)
    fabric = Fabric(max(most, cluster.gpus_per_node), nics, cluster.nic_bandwidth * cluster.nics_per_node / nics, 1.0,
                    min(cluster.rails, nics), leaves)
    return Seats(fabric, training, rollout)


def apart(ranks: int, engines: Collection[EngineRank]) -> Seats:
    """Seats without a placement: every training rank and every engine has its own node."""
    training = tuple(Place(rank, 0) for rank in range(ranks))
    rollout = {(replica, worker): Place(ranks + replica, worker) for replica, worker in engines}
    return Seats(one_card(1 + max((worker for _, worker in engines), default=0)), training, rollout)


def one_card(gpus_per_node: int) -> Fabric:
    """Nodes with one network card. Routes do not depend on the rates."""
    return Fabric(gpus_per_node, 1, 1.0, 1.0, 1)


def seated(moved: Sequence[Flow], training: TrainingLayout, seats: Seats, senders: Collection[int],
           workers: Mapping[EngineRank, Worker]) -> Traffic:
    """The traffic between these members.

    Args:
        moved: flows from each shard to each kind of worker.
        senders: the training ranks that may send.
        workers: the engine ranks that receive, with their kind.
    """
    on_node: dict[int, list[tuple[Worker, int]]] = defaultdict(list)
    for key in sorted(workers):
        place = seats.rollout[key]
        on_node[place.node].append((workers[key], place.gpu))
    alike: dict[tuple[tuple[Worker, int], ...], list[int]] = defaultdict(list)
    for node in sorted(on_node):
        alike[tuple(on_node[node])].append(node)
    fabric = seats.fabric
    kinds = tuple(node_kind(tuple(moved), held, tuple(nodes), fabric.gpus_per_node, fabric.nics_per_node, fabric.rails)
                  for held, nodes in alike.items())
    alive = tuple(place if rank in senders else None for rank, place in enumerate(seats.training))
    return assemble(fabric, training, kinds, (), sum(flow.bytes for flow in moved), seats=alive)
