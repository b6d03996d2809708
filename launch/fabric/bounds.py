"""Times below which no route can be, whatever it does: every rollout node must take in every byte that its engines
need, and every byte must leave a NIC."""

from __future__ import annotations

from typing import NamedTuple

from launch.fabric.lanes import Traffic


class Bounds(NamedTuple):
    """Seconds, at line rate."""

    ingress: float
    """Busiest rollout NIC: one copy of what its GPUs take."""
    egress: float
    """All NICs of both partitions send what all rollout nodes take: relays included."""
    source: float
    """Busiest training stage: one copy of each shard leaves its holders."""
    spine: float
    """One copy into each leaf that has rollout nodes and no training node; 0 where the spine is not thin."""
    nvlink: float
    """Bytes between twins of a node."""

    @property
    def floor(self) -> float:
        return max(self)

    @property
    def binding(self) -> str:
        """Which one it is."""
        return max(zip(self, self._fields), key=lambda pair: pair[0])[1]


def bounds(traffic: Traffic) -> Bounds:
    """Of any route over this traffic."""
    fabric = traffic.fabric
    nic = fabric.nic_bandwidth
    ingress = max((max(kind.ingress, default=0) for kind in traffic.kinds), default=0)
    wanted = sum(sum(kind.ingress) * len(kind.nodes) for kind in traffic.kinds)
    trainer_nics = -(-traffic.training.gpus * fabric.nics_per_node // fabric.gpus_per_node)
    nics = trainer_nics + traffic.rollout_nodes * fabric.nics_per_node
    return Bounds(ingress / nic, wanted / (nics * nic), _source(traffic) / nic, _spine(traffic),
                  max((kind.twin_bytes for kind in traffic.kinds), default=0) / fabric.nvlink_bandwidth)


def _source(traffic: Traffic) -> float:
    """Bytes that a holder of the busiest shard must send if all holders share one copy of it."""
    most = 0.0
    for kind in traffic.kinds:
        needed: dict = {}
        for piece in kind.pieces:
            ranges = needed.setdefault(piece.shard, {})
            key = (piece.first_byte, piece.first_byte + piece.bytes)
            ranges[piece.worker, key] = piece.bytes
        for shard, ranges in needed.items():
            holders = traffic.training.cp * traffic.training.dp
            if shard.routed:
                holders = max(1, holders * traffic.training.tp // (traffic.training.ep * traffic.training.etp))
            if traffic.senders_limit:
                holders = min(holders, traffic.senders_limit)
            most = max(most, sum(ranges.values()) / holders)
    return most


def _spine(traffic: Traffic) -> float:
    fabric = traffic.fabric
    if not fabric.spine_bandwidth:
        return 0.0
    gpus = fabric.gpus_per_node
    near = {fabric.leaf(node) for node in range(-(-traffic.training.gpus // gpus))}
    far: dict[int, int] = {}
    for kind in traffic.kinds:
        for node in kind.nodes:
            leaf = fabric.leaf(node)
            if leaf not in near:
                far[leaf] = max(far.get(leaf, 0), sum(kind.ingress))
    return max(far.values(), default=0) / fabric.spine_bandwidth
