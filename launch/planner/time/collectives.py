"""Time of NCCL's collectives by size, ranks and place.

    t = latency + x / B + 2 sqrt(chunk x / B)

`x` is what a rank sends over the slowest link (nccl-tests' bus bandwidth convention), `B` that link's bandwidth. A
ring cut into k chunks takes (steps + k)(chunk + x / (k B)); the best k leaves the square root, which is why
messages of some MB reach half of the bandwidth and only those of a GB all of it (Thakur, Rabenseifner, Gropp 2005
for the alpha-beta form). Latency counts the steps of a ring: each hop in a node and each between nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.cluster.spec import ClusterSpec
from launch.coefficients.collectives import CollectiveCoefficients
from launch.plan.book import part

SWITCH_RANKS = 5
"""Fewest ranks for which NCCL lets the NVLink switch sum: with four it picks the ring (H200, nccl-tests)."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks of a communicator: how many, and how many of them share a node (so many rails it has across nodes)."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


def group(ranks: int, stride: int, gpus_per_node: int) -> RankGroup:
    """The group whose members lie `stride` ranks apart, nodes filled in rank order."""
    return RankGroup(ranks, max(1, min(ranks, gpus_per_node // max(1, stride))))


@dataclass(eq=False)
class CollectiveTime:
    """The links of a cluster with the coefficients of the library that drives them. All results are seconds."""

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
        """`size`: bytes of a rank's buffer. In a node and over two the NVLink switch sums; across nodes a tree of
        them takes 2 log2(nodes) steps where a ring takes all, at no more than the ring's bandwidth (NCCL 2.4 and
        later)."""
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
        """NVLink 4 and later sum in the switch, for groups that fill one or two nodes evenly."""
        return (nvlink_bandwidth >= 400e9 and group.ranks >= SWITCH_RANKS and group.nodes <= 2
                and group.per_node * group.nodes == group.ranks)

    def broadcast(self, size: float, group: RankGroup) -> float:
        """ncclBroadcast, which is always a ring."""
        if group.ranks <= 1 or size <= 0:
            return 0.0
        return self._pipeline(self._latency(group), size / self._ring_bandwidth(group))

    def dispatch(self, size: float, copies: int, group: RankGroup) -> float:
        """Tokens to `copies` ranks each, drawn evenly; `size`: bytes of the tokens, once. A token crosses to another
        node once, however many of its experts are there, and is spread over NVLink behind the NIC (DeepEP's and
        Megatron's flexible dispatcher)."""
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
        """The kernels that inference engines use inside a CUDA graph: every rank reads from all others at once, so a
        chunk costs one step and nothing is summed on the way."""
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
