"""Lower bounds for the time of any route: every rollout node must receive every byte that its engines need, and every
byte must leave a NIC."""

from __future__ import annotations

from dataclasses import dataclass

from launch.fabric.estimate import RouteCost
from launch.fabric.lanes import Fabric, Traffic
from launch.plan.book import line, nonzero, part


@dataclass(eq=False)
class Bounds:
    """Lower bounds in seconds, at line rate."""

    PREFIX = "sync.floor"

    traffic: Traffic
    fabric: Fabric
    direct: RouteCost

    @line("s", "one node's copy over its NICs", key="ingress_s", written=nonzero)
    def ingress(self) -> float:
        """One copy of the bytes for its GPUs goes into the busiest rollout NIC."""
        return self.direct.rollout_nic_in_bytes / self.fabric.nic_bandwidth

    @line("s", "all copies over all NICs, relays included", key="egress_s", written=nonzero)
    @part
    def egress(self) -> float:
        """All NICs of both partitions, relays included, send the bytes for all rollout nodes."""
        traffic, fabric = self.traffic, self.fabric
        wanted = sum(sum(kind.ingress) * len(kind.nodes) for kind in traffic.kinds)
        trainer_nics = -(-traffic.training.gpus * fabric.nics_per_node // fabric.gpus_per_node)
        nics = trainer_nics + traffic.rollout_nodes * fabric.nics_per_node
        return wanted / (nics * fabric.nic_bandwidth)

    @line("s", "one copy out of the holders of the busiest shard", key="source_s", written=nonzero)
    @part
    def source(self) -> float:
        """One copy of each shard leaves its holders, for the busiest shard."""
        return _source(self.traffic) / self.fabric.nic_bandwidth

    @line("s", "bytes between twins of a node", key="nvlink_s", written=nonzero)
    def nvlink(self) -> float:
        """Bytes between twins go over NVLink."""
        return self.direct.nvlink_bytes / self.fabric.nvlink_bandwidth

    @line("s", "lower bound for any route: the largest of its parts", key="sync.floor_s")
    def floor(self) -> float:
        return max(self.ingress, self.egress, self.source, self.nvlink)

    @property
    def binding(self) -> str:
        """Name of the largest bound."""
        names = ("ingress", "egress", "source", "nvlink")
        return max(names, key=lambda name: getattr(self, name))


def _source(traffic: Traffic) -> float:
    """Bytes per holder of the busiest shard if its holders share the sending of one copy."""
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
            most = max(most, sum(ranges.values()) / holders)
    return most
