"""Time of NCCL's collectives by size, number of ranks and location of the ranks.

    t = latency + x / B + 2 sqrt(chunk x / B)

`x` is the bytes that a rank sends over the slowest link (nccl-tests' bus bandwidth convention), and `B` is the
bandwidth of that link. A ring with k chunks takes (steps + k)(chunk + x / (k B)), and the best k gives the square root.
So messages of some MB reach half of the bandwidth, and only messages of a GB reach all of it (alpha-beta form: Thakur,
Rabenseifner, Gropp 2005). The latency counts the steps of a ring: each hop inside a node and each hop between nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.plan.book import part

SWITCH_RANKS = 5
"""Fewest ranks for which NCCL sums in the NVLink switch. With four it picks the ring (H200, nccl-tests)."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a communicator."""

    ranks: int
    per_node: int
    """Ranks that share a node, which is also the number of rails that the communicator uses between nodes."""

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


def group(ranks: int, stride: int, gpus_per_node: int) -> RankGroup:
    """The group of members that are `stride` ranks apart. Nodes are filled in rank order."""
    return RankGroup(ranks, max(1, min(ranks, gpus_per_node // max(1, stride))))


@dataclass(eq=False)
class CollectiveTime:
    """Times of collectives on the links of a cluster, in seconds."""

    cluster: ClusterSpec
    c: CollectiveCoefficients

    @part
    def nvlink(self) -> float:
        return max(self.cluster.gpu.nvlink_bandwidth, 1.0)

    @part
    def nic(self) -> float:
        return max(self.cluster.nic_bandwidth, 1.0)

    @part
    def nics_per_gpu(self) -> float:
        return self.cluster.nics_per_node / max(1, self.cluster.gpus_per_node)

    def all_gather(self, size: float, group: RankGroup) -> float:
        """`size`: bytes of the gathered buffer."""
        return self._ring(size, group)

    def reduce_scatter(self, size: float, group: RankGroup) -> float:
        """`size`: bytes of a rank's input."""
        return self._ring(size, group)

    def all_reduce(self, size: float, group: RankGroup) -> float:
        """`size`: bytes of a rank's buffer. On one or two nodes the NVLink switch sums. On more, a tree of nodes takes
        2 log2(nodes) steps instead of all steps of a ring, at the bandwidth of a ring (NCCL 2.4 and later)."""
        n, nodes, c = group.ranks, group.nodes, self.c
        if n <= 1 or size <= 0:
            return 0.0
        bandwidth = c.switch_share * self.nvlink if self.summed_in_switch(self.nvlink,
                                                                          group) else self._ring_bandwidth(group)
        wire_s = 2 * (n - 1) / n * size / bandwidth
        if nodes == 1:
            return self._pipeline(self._latency(group), wire_s)
        steps = (group.per_node - 1) * c.hop_s + 2 * math.ceil(math.log2(nodes)) * c.node_hop_s
        return self._pipeline(c.launch_s + steps, wire_s)

    @staticmethod
    def summed_in_switch(nvlink_bandwidth: float, group: RankGroup) -> bool:
        """Whether the switch sums: NVLink 4 or later, and a group that fills one or two nodes evenly."""
        return (nvlink_bandwidth >= 400e9 and group.ranks >= SWITCH_RANKS and group.nodes <= 2
                and group.per_node * group.nodes == group.ranks)

    def broadcast(self, size: float, group: RankGroup) -> float:
        """ncclBroadcast always uses a ring. `size`: bytes of the message."""
        if group.ranks <= 1 or size <= 0:
            return 0.0
        return self._pipeline(self._latency(group), size / self._ring_bandwidth(group))

    def dispatch(self, size: float, copies: int, group: RankGroup) -> float:
        """Sends each token to `copies` ranks, drawn evenly. `size`: bytes of one copy of all tokens. A token crosses to
        another node only once, for any number of experts there, and is distributed over NVLink behind the NIC (DeepEP's
        and Megatron's flexible dispatcher)."""
        n, nodes = group.ranks, group.nodes
        if n <= 1 or size <= 0:
            return 0.0
        outside = 0.0
        if nodes > 1:
            visited = (nodes - 1) * (1 - (1 - 1 / nodes) ** copies)
            outside = size * visited / (self.c.nic_share * self.nic * self.nics_per_gpu)
        inside = size * copies * (n - 1) / n / (self.c.ring_share * self.nvlink)
        return self._pipeline(self.c.launch_s + (nodes - 1) * self.c.node_hop_s, max(outside, inside))

    def p2p(self, size: float, within_node: bool) -> float:
        """One message between two ranks."""
        c = self.c
        if within_node:
            return self._pipeline(c.launch_s + c.hop_s, size / (c.ring_share * self.nvlink))
        rate = c.nic_share * self.nic * max(1.0, self.nics_per_gpu)
        return self._pipeline(c.launch_s + c.node_hop_s, size / rate)

    def direct_all_reduce(self, size: float, ranks: int) -> float:
        """All-reduce by the kernels that inference engines use inside a CUDA graph. Every rank reads from all others at
        once, so a chunk costs one step and nothing is summed on the way."""
        if ranks <= 1 or size <= 0:
            return 0.0
        wire_s = 2 * (ranks - 1) / ranks * size / (self.c.ring_share * self.nvlink)
        return self.c.launch_s + wire_s + 2 * math.sqrt(self.c.hop_s * wire_s)

    def _ring(self, size: float, group: RankGroup) -> float:
        n = group.ranks
        if n <= 1 or size <= 0:
            return 0.0
        wire_s = (n - 1) / n * size / self._ring_bandwidth(group)
        return self._pipeline(self._latency(group), wire_s)

    def _ring_bandwidth(self, group: RankGroup) -> float:
        inside = self.c.ring_share * self.nvlink
        if group.nodes <= 1:
            return inside
        return min(inside, self.c.nic_share * self.nic * self.nics_per_gpu * group.per_node)

    def _latency(self, group: RankGroup) -> float:
        c, nodes = self.c, group.nodes
        across = c.network_s + (nodes - 1) * c.node_hop_s if nodes > 1 else 0.0
        return c.launch_s + (group.ranks - nodes) * c.hop_s + across

    def _pipeline(self, latency: float, wire_s: float) -> float:
        return latency + wire_s + 2 * math.sqrt(self.c.chunk_s * wire_s)
