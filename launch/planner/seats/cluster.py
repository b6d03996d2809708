"""The placement of both partitions on real nodes: rank -> node -> GPU -> NIC. Pure and deterministic: the order of the
given nodes does not matter. `launch.planner.seats.local` places a run on one machine.

In Megatron's order, consecutive ranks form a TP x CP block, and a block stays inside one node. The blocks of a node are
arranged so that a DP group uses the same local GPUs on all its nodes, and so do neighbouring stages. Equal local
indices are on the same rail.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

from launch.cluster.spec import ClusterSpec
from launch.cluster.tree import natural_order, topology
from launch.errors import UserError
from launch.plan.layouts import RolloutLayout, TrainingLayout
from launch.plan.plan import EnginePlacement, Placement, RankPlacement
from launch.planner.seats.nodes import choose_nodes
from launch.ports import Ports

Mode = Literal["disaggregated", "colocated", "hybrid"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A GPU of a node."""

    node: str
    gpu: int
    nic: int
    """Index of the NIC next to the GPU. In a rail-optimised fabric it is also the rail."""


@dataclass(frozen=True, slots=True)
class Seating:
    """The seats of both partitions. In mode disaggregated, a GPU serves at most one rank. In the modes colocated and
    hybrid, an engine may share the GPUs of training ranks."""

    training: tuple[Seat, ...]
    """The seat of each rank."""
    rollout: tuple[tuple[Seat, ...], ...]
    """The seats of each replica, by the engine's rank (tp + TP pp)."""
    training_nodes: tuple[str, ...]
    rollout_nodes: tuple[str, ...]
    """Nodes that only roll out."""
    spares: tuple[str, ...]
    idle: tuple[Seat, ...]
    """GPUs without a process on nodes in use, left over because sizes do not divide."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the TP x CP blocks of a training layout fill nodes."""

    unit: int
    """Number of consecutive ranks in a block."""
    per_node: int
    """Blocks per node; 0: a block spans `unit / gpus_per_node` nodes."""
    side: int
    """Blocks of one stage in a node; the other blocks of the node belong to neighbouring stages. 0: blocks are placed
    one after another, because neither DP nor PP divides."""

    def nodes(self, layout: TrainingLayout, gpus_per_node: int) -> tuple[int, int]:
        """(groups of nodes, nodes of each group). A group holds whole DP rings."""
        if self.per_node == 0:
            return layout.pp, layout.dp * layout.cp * layout.tp // gpus_per_node
        if self.side:
            return layout.pp // (self.per_node // self.side), self._rings(layout) // self.side
        return 1, -(-layout.gpus // self.unit // self.per_node)

    def _rings(self, layout: TrainingLayout) -> int:
        """Number of blocks of one stage."""
        return layout.replica_gpus // layout.pp * layout.dp // self.unit

    def seat(self, block: int, layout: TrainingLayout) -> tuple[int, int]:
        """(node, place in the node) of a block. Blocks are counted stage by stage."""
        if not self.side:
            return divmod(block, self.per_node)
        stage, index = divmod(block, self._rings(layout))
        group, row = divmod(stage, self.per_node // self.side)
        if group % 2:                   # alternate, so that the edge to the next group keeps its local index
            row = self.per_node // self.side - 1 - row
        return index // self.side + self._rings(layout) // self.side * group, index % self.side + self.side * row


def place(training: TrainingLayout, rollout: RolloutLayout, cluster: ClusterSpec,
          nodes: Sequence[str] | None = None, *, mode: Mode = "disaggregated", spares: int = 0,
          avoid: Collection[str] = (), gpu_order: Sequence[int] = (), tp_across_nodes: bool = False) -> Seating:
    """Seat every rank and every engine.

    Args:
        training, rollout: parallel sizes.
        cluster: GPUs and NICs of a node, the switch tree.
        nodes: the allocated nodes, in any order; None: the cluster's nodes.
        mode: `disaggregated` gives each GPU to one process. `colocated` and `hybrid` put engines on the training nodes
            first, and on further nodes if those do not suffice.
        spares: number of nodes to keep free.
        avoid: nodes that become spares if possible, for example the slowest ones of a preflight.
        gpu_order: GPU of each engine rank of a whole node, from `launch.fabric.gpu_order.engine_gpu_order`; (): natural
            order.
        tp_across_nodes: allow a TP group that is larger than a node.

    Raises:
        UserError: there are no nodes or too few; a node is named twice; TP is larger than a node without
            `tp_across_nodes`, or does not fill whole nodes with it; `gpu_order` uses a GPU twice.
    """
    names = natural_order(cluster.nodes if nodes is None else nodes)
    per_node = cluster.gpus_per_node
    _check(names, training, rollout, per_node, spares, gpu_order, tp_across_nodes)
    blocks = _blocks(training, per_node)
    stages, ring = blocks.nodes(training, per_node)
    extra = _rollout_nodes(training, rollout, blocks, stages * ring, per_node, mode)
    if len(names) < stages * ring + extra + spares:
        raise _too_few(len(names), stages * ring, extra, spares, nodes is not None)
    choice = choose_nodes(topology(cluster.switches, names), stages, ring, extra, avoid)
    ranks = [_rank_seat(rank, training, blocks, choice.training, cluster) for rank in range(training.gpus)]
    if mode == "disaggregated":
        engines = _engine_seats(rollout, (*choice.rollout, *choice.training), set(ranks), cluster, gpu_order)
    else:
        engines = _engine_seats(rollout, (*choice.training, *choice.rollout), set(), cluster, gpu_order)
    taken = {*ranks, *(seat for engine in engines for seat in engine)}
    used = (*choice.training, *choice.rollout)
    idle = [seat for node in used for seat in _seats(node, cluster) if seat not in taken]
    return Seating(tuple(ranks), engines, choice.training, choice.rollout, choice.spare, tuple(idle))


def nodes_needed(training: TrainingLayout, rollout: RolloutLayout, cluster: ClusterSpec,
                 mode: Mode = "disaggregated") -> int:
    """Number of nodes that `place` needs for these layouts, without spares."""
    blocks = _blocks(training, cluster.gpus_per_node)
    stages, ring = blocks.nodes(training, cluster.gpus_per_node)
    return stages * ring + _rollout_nodes(training, rollout, blocks, stages * ring, cluster.gpus_per_node, mode)


def bind(seating: Seating, plan_fingerprint: str, attempt: int, addresses: Mapping[str, str],
         ports: Ports | Mapping[str, Ports], interfaces: Mapping[str, str] | None = None) -> Placement:
    """The placement of one attempt.

    Args:
        addresses: address of every node in the job's network.
        ports: the block of ports of each node, or one block that is free on all nodes. Lanes are numbered per node.
        interfaces: the network interface of each node's address.
    """
    used = (*seating.training_nodes, *seating.rollout_nodes)
    blocks = dict.fromkeys(used, ports) if isinstance(ports, Ports) else {node: ports[node] for node in used}
    lanes: dict[str, int] = {}
    ranks = []
    for rank, seat in enumerate(seating.training):
        lane = lanes[seat.node] = lanes.get(seat.node, -1) + 1
        ranks.append(RankPlacement(rank=rank, node=seat.node, gpu=seat.gpu, nic=seat.nic,
                                   port=blocks[seat.node].lane(lane)))
    engines = tuple(
        EnginePlacement(replica=replica, node=seats[0].node, gpus=tuple(seat.gpu for seat in seats),
                        nics=tuple(seat.nic for seat in seats),
                        nodes=tuple(seat.node for seat in seats) if len({seat.node for seat in seats}) > 1 else ())
        for replica, seats in enumerate(seating.rollout))
    return Placement(
        attempt=attempt, plan_fingerprint=plan_fingerprint, nodes=used,
        addresses={node: addresses[node] for node in used}, training=tuple(ranks), rollout=engines,
        master_port=blocks[ranks[0].node].rendezvous, rewards=seating.training_nodes, spares=seating.spares,
        ports={} if isinstance(ports, Ports) else {node: block.base for node, block in blocks.items()},
        interfaces={node: interfaces[node] for node in used} if interfaces else {})


def _check(names: Sequence[str], training: TrainingLayout, rollout: RolloutLayout, per_node: int, spares: int,
           gpu_order: Sequence[int], tp_across_nodes: bool) -> None:
    if not names:
        raise UserError("there are no nodes to place the job on", where="the node list",
                        fix="name at least one node, or leave the list out to use the cluster's nodes")
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UserError(f"{twice[0]} is in the node list twice", where="the node list", fix="name each node once")
    if spares < 0:
        raise UserError(f"{spares} spare nodes", where="placement.spare_nodes", fix="use 0 or more")
    for key, tp in (("trainer.tp", training.tp), ("rollout.tp", rollout.tp)):
        if tp > per_node and not tp_across_nodes:
            raise UserError(f"{key} = {tp} exceeds the {per_node} GPUs of a node: its traffic would leave NVLink",
                            where=key,
                            fix=f"use {key} <= {per_node}, or allow it with placement.tp_across_nodes=true")
        if tp > per_node and tp % per_node:
            raise UserError(f"{key} = {tp} does not fill whole nodes of {per_node} GPUs", where=key,
                            fix=f"use a multiple of {per_node}, or at most {per_node}")
    if gpu_order:
        _check_order(gpu_order, rollout.tp * rollout.pp, per_node)


def _check_order(gpu_order: Sequence[int], size: int, per_node: int) -> None:
    """Check for one entry per engine rank of a node (or of the nodes of one engine), without a GPU twice on a node."""
    ranks = max(per_node // size * size, size)
    nodes = [gpu_order[first:first + per_node] for first in range(0, len(gpu_order), per_node)]
    each_once = all(len(set(part)) == len(part) and set(part) <= set(range(per_node)) for part in nodes)
    if len(gpu_order) != ranks or not each_once:
        raise UserError(f"the GPU order {list(gpu_order)} does not give each of {ranks} engine ranks its own GPU",
                        where="the GPU order of an engine",
                        fix=f"give {ranks} GPUs from 0 to {per_node - 1}, each once per node")


def _blocks(layout: TrainingLayout, per_node: int) -> _Blocks:
    """TP x CP blocks if they fit into a node, else TP blocks with CP across nodes. A node holds as many blocks of one
    stage as divide evenly, and then blocks of neighbouring stages. If neither divides, blocks follow one another."""
    if layout.tp > per_node:
        return _Blocks(layout.tp, 0, 0)
    unit = layout.tp * layout.cp if layout.tp * layout.cp <= per_node else layout.tp
    count = per_node // unit
    ring = layout.tp * layout.cp * layout.dp // unit
    side = gcd(ring, count)
    return _Blocks(unit, count, side if layout.pp % (count // side) == 0 else 0)


def _rank_seat(rank: int, layout: TrainingLayout, blocks: _Blocks, nodes: Sequence[str],
               cluster: ClusterSpec) -> Seat:
    if blocks.per_node == 0:
        node, gpu = divmod(rank, cluster.gpus_per_node)
    else:
        node, slot = blocks.seat(rank // blocks.unit, layout)
        gpu = slot * blocks.unit + rank % blocks.unit
    return _seat(nodes[node], gpu, cluster)


def _usable(layout: RolloutLayout, per_node: int) -> int:
    """GPUs of a node that an engine across nodes uses: whole TP groups."""
    return per_node // layout.tp * layout.tp if layout.tp <= per_node else per_node


def _rollout_nodes(training: TrainingLayout, rollout: RolloutLayout, blocks: _Blocks, training_nodes: int,
                   per_node: int, mode: Mode) -> int:
    """Number of nodes that the engines need in addition to the training nodes."""
    size = rollout.tp * rollout.pp
    fits, span = per_node // size, -(-size // _usable(rollout, per_node))
    if mode != "disaggregated":
        return max(0, (-(-rollout.replicas // fits) if fits else rollout.replicas * span) - training_nodes)
    if not fits:
        return rollout.replicas * span
    left = rollout.replicas
    if blocks.per_node:                 # engines use the GPUs that training leaves over
        free = [per_node] * training_nodes
        for block in range(training.gpus // blocks.unit):
            free[blocks.seat(block, training)[0]] -= blocks.unit
        left -= sum(gpus // size for gpus in free)
    return -(-max(0, left) // fits)


def _engine_seats(layout: RolloutLayout, nodes: Sequence[str], taken: Collection[Seat], cluster: ClusterSpec,
                  gpu_order: Sequence[int]) -> tuple[tuple[Seat, ...], ...]:
    """Engines on the free GPUs of `nodes`, node by node. A whole node is filled in `gpu_order`, a partly used one in
    natural order."""
    size, per_node, usable = layout.tp * layout.pp, cluster.gpus_per_node, _usable(layout, cluster.gpus_per_node)
    found: list[tuple[Seat, ...]] = []
    pool: list[Seat] = []                       # seats of an engine that still needs further nodes
    for node in nodes:
        seats = _seats(node, cluster)
        free = [seat for seat in seats if seat not in taken]
        if len(free) == per_node:
            order = gpu_order[len(pool):len(pool) + per_node] if usable == per_node or size <= per_node else ()
            free = [seats[gpu] for gpu in order or range(per_node if size <= per_node else usable)]
        elif size > per_node:
            continue
        if size > per_node:
            pool += free
            if len(pool) < size:
                continue
            free, pool = pool, []
        found += [tuple(free[first:first + size]) for first in range(0, len(free) - size + 1, size)]
    return tuple(found[:layout.replicas])


def _seats(node: str, cluster: ClusterSpec) -> list[Seat]:
    return [_seat(node, gpu, cluster) for gpu in range(cluster.gpus_per_node)]


def _seat(node: str, gpu: int, cluster: ClusterSpec) -> Seat:
    return Seat(node, gpu, gpu * cluster.nics_per_node // cluster.gpus_per_node)


def _too_few(given: int, training: int, rollout: int, spares: int, listed: bool) -> UserError:
    parts = [f"{training} for training", f"{rollout} for rollout", f"{spares} spare"]
    return UserError(
        f"the plan needs {training + rollout + spares} nodes ({', '.join(parts)}) and there are {given}",
        where="the node list" if listed else "the cluster's nodes",
        fix="give more nodes, plan for these (`megatron-rl plan` on this cluster), or keep fewer spares")
