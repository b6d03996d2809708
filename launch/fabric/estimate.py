"""Bytes through the busiest NICs and the expected time of each route, in closed form: what the search calls.

With W bytes into the busiest rollout NIC, B its real rate, a the cost of a chunk, c the chunk, H hops:

    direct   max(in, out)/B + chunks a
    chain    W/B + (W/c) a +   (H - 1)(c/B + a)      c = sqrt(W a B / (H - 1))
    tree     W/B + (W/c) a + 2 (H - 1)(c/B + a)      H = floor(log2 R) + 1: double binary, half the bytes each

(the usual pipeline formulas; Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast", Parallel
Computing 35, 2009, for the third). `simulate` counts the same chunk by chunk; a test holds the two together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.lanes import Fabric, NodeKind, ShardDemand, Traffic
from launch.fabric.shards import Shard
from launch.plan.book import line, part

Kind = Literal["direct", "chain", "tree"]
KINDS: tuple[Kind, ...] = ("direct", "chain", "tree")
"""From the simplest to the most involved: a tie goes to the first."""
MIB = 1 << 20
SMALL_STEP = MIB // 16
"""Of chunks below a MiB."""
DEFAULT_BUCKET = 256 * MIB
SENDING, RECEIVING = 2, 2
"""Chunks that a training rank holds, and a receiver of each transfer that it takes in at once: one travels while the
other is packed, or written and passed on."""
MINOR = 20
"""A transfer below 1/MINOR of what its NIC takes in (vocabulary rows on the border of two ranks) is a small one."""


def forwards(cost: RouteCost, value: float) -> bool:
    """Whether receivers pass on what they take."""
    return cost.kind != "direct"


@dataclass(eq=False)
class RouteCost:
    """One route, predicted: bytes through the busiest NIC of each sort, and seconds."""

    kind: Kind
    traffic: Traffic
    fabric: Fabric
    c: SyncCoefficients
    bucket_bytes: int = DEFAULT_BUCKET
    quantise: bool = False
    """The engines quantise what they receive."""

    @property
    def PREFIX(self) -> str:
        return f"sync.{self.kind}"

    @line("bytes",
          lambda self: "busiest training NIC: its shard" + (" x its receivers" if self.kind == "direct" else ""),
          key="trainer_nic_out_bytes", shown=round)
    @part
    def egress(self) -> float:
        """Out of a training NIC."""
        return _egress(self.traffic, self.kind)

    @line("bytes", "busiest rollout NIC: one copy for its node over its NICs")
    @part
    def rollout_nic_in_bytes(self) -> int:
        return max((max(each.ingress, default=0) for each in self.traffic.kinds), default=0)

    @line("bytes", "into a GPU from engines that share its node")
    @part
    def nvlink_bytes(self) -> int:
        """Between twins of a node, into the busiest GPU."""
        return max((each.twin_bytes for each in self.traffic.kinds), default=0)

    @line("", lambda self: f"NIC hops: receivers / senders{', its log2' if self.kind == 'tree' else ''}",
          written=forwards)
    @part
    def hops(self) -> int:
        """Of the last receiver."""
        return 1 if self.kind == "direct" else max([1, *(_hops(*each, self.kind) for each in self.by_kind)])

    @line("bytes", "busiest rollout NIC: what it forwards", written=forwards)
    @part
    def rollout_nic_out_bytes(self) -> int:
        """0 for `direct`."""
        if self.kind == "direct" or self.hops == 1:
            return 0
        return max(max(each.ingress, default=0)
                   for each, demands in self.by_kind if _hops(each, demands, self.kind) > 1)

    @line("s", "bytes of the busiest NIC / its line rate, or NVLink")
    def lower_bound_s(self) -> float:
        """Busiest NIC of this route at line rate."""
        return max(self.busiest / self.fabric.nic_bandwidth, self.nvlink_bytes / self.fabric.nvlink_bandwidth)

    @line("bytes", "sqrt(W a B / fill), or all where nobody forwards; at most a bucket")
    @part
    def chunk_bytes(self) -> int:
        """The chunk that makes chunks' latency and the pipeline's fill equal, in whole MiB (or 64 KiB, where it is less
        than one)."""
        if not self.fill or not self.busiest:
            return min(self.bucket_bytes, MIB * ceil(max(1, self.busiest) / MIB))
        best = sqrt(self.busiest * self.c.chunk_latency_s * self.rate / self.fill)
        step = MIB if best >= MIB else SMALL_STEP
        return min(self.bucket_bytes, max(1, round(best / step)) * step)

    @line("s", "W/(e B) + (W/c) a + fill (c/(e B) + a); fill = H - 1 (chain), 2 (H - 1) (tree)")
    @part
    def wire_s(self) -> float:
        """First byte to last byte, expected."""
        latency, busiest, chunk = self.c.chunk_latency_s, self.busiest, self.chunk_bytes
        chunks = busiest / chunk + self.transfers / 2          # a transfer's last chunk is half full on average
        wire = busiest / self.rate + chunks * latency + self.fill * (chunk / self.rate + latency)
        if self.nvlink_bytes:
            nvlink_rate = self.fabric.nvlink_bandwidth * self.c.nvlink_efficiency
            wire = max(wire, self.nvlink_bytes / nvlink_rate) + chunk / nvlink_rate
        return wire

    @line("s", "pause + barriers + wire + 2 c/copy rate + held/digest rate (+ held/quantise rate)", key="seconds")
    @part
    def expected_s(self) -> float:
        """The whole sync: pause, barriers, wire, packing that nothing overlaps, digest, requantising."""
        c, held = self.c, self.rollout_nic_in_bytes + self.nvlink_bytes
        return (c.pause_s + c.barrier_s + self.wire_s + 2 * self.chunk_bytes / c.copy_rate
                + held / c.digest_rate + (held / c.quantise_rate if self.quantise else 0.0))

    @line("bytes", "2 chunks")
    def trainer_staging_bytes(self) -> int:
        """Two chunks on each sending GPU."""
        return SENDING * self.chunk_bytes

    @line("bytes", "2 chunks x transfers into a GPU at the same time")
    def rollout_staging_bytes(self) -> int:
        """Two chunks for each transfer that a receiving GPU takes in at once; what it forwards leaves from there."""
        # With slots the first chunks of the next transfer arrive while the last of this one are unpacked.
        streams = min(2, self.transfers) if self.kind == "direct" else self.transfers * (
            2 if self.kind == "tree" and self.rollout_nic_out_bytes else 1)
        return RECEIVING * self.chunk_bytes * streams

    @line("transfers", "large ones into the busiest rollout NIC", key="sync.transfers")
    @part
    def transfers(self) -> int:
        return max((_transfers(self.traffic, each) for each in self.traffic.kinds), default=0)

    @property
    def by_kind(self) -> list[tuple[NodeKind, Sequence[ShardDemand]]]:
        return list(zip(self.traffic.kinds, self.traffic.demands, strict=True))

    @property
    def trainer_nic_out_bytes(self) -> int:
        return round(self.egress)

    @part
    def busiest(self) -> float:
        return max(self.rollout_nic_in_bytes, self.egress, self.rollout_nic_out_bytes)

    @property
    def fill(self) -> int:
        """Chunks that pass before the last receiver's pipeline is full."""
        return (self.hops - 1) * (2 if self.kind == "tree" else 1)

    @property
    def rate(self) -> float:
        return self.fabric.nic_bandwidth * self.c.nic_efficiency


def swap_seconds(weight_bytes: float, coefficients: SyncCoefficients) -> float:
    """For how long an engine serves nothing that receives into a second copy of its weights: it pauses, copies them
    inside the GPU, digests what is live, and resumes; of the protocol's three barriers it waits for one.

    Args:
        weight_bytes: of one GPU.
    """
    return (coefficients.pause_s + coefficients.barrier_s / 3 + weight_bytes / coefficients.copy_rate
            + weight_bytes / coefficients.digest_rate)


def dealt_whole(each: NodeKind, demands: Sequence[ShardDemand]) -> bool:
    """Whether the senders of a shard deal its receivers out among themselves (`direct`): where that costs no time,
    since they divide evenly or the busiest sender is done before its receivers are. Else every sender sends its part
    of every copy. One answer for all shards of a kind of node: the two do not share a Latin square."""
    receivers, ingress = len(each.nodes), max(each.ingress, default=0)
    return all(receivers % demand.senders == 0 or demand.bytes * MINOR < ingress
               or ceil(receivers / demand.senders) * demand.bytes <= ingress for demand in demands)


def _egress(traffic: Traffic, kind: Kind) -> float:
    """Out of the busiest training NIC."""
    per_rail: dict[tuple[Shard, int], float] = defaultdict(float)
    spread: dict[Shard, float] = defaultdict(float)
    for each, demands in zip(traffic.kinds, traffic.demands, strict=True):
        receivers = len(each.nodes)
        whole = kind == "direct" and dealt_whole(each, demands)
        for shard, rail, size, count, aligned in demands:
            copies = 1.0 if kind != "direct" else ceil(receivers / count) if whole else receivers / count
            if aligned:
                per_rail[shard, rail] += size * copies
            else:
                spread[shard] += size * copies
    busiest = dict(spread)
    for (shard, _), out in per_rail.items():
        busiest[shard] = max(busiest.get(shard, 0.0), out + spread.get(shard, 0.0))
    dense: dict[int, float] = {}
    experts: dict[int, float] = {}
    for shard, out in busiest.items():
        part = experts if shard.routed else dense
        part[shard.pp] = max(part.get(shard.pp, 0.0), out)
    shared = max(1, traffic.fabric.gpus_per_node // traffic.fabric.nics_per_node)
    most = max((dense.get(stage, 0.0) + experts.get(stage, 0.0) for stage in {*dense, *experts}), default=0.0)
    return most * min(shared, traffic.training.gpus)


def _hops(each: NodeKind, demands: Sequence[ShardDemand], kind: Kind) -> int:
    """NIC hops into nodes of one kind, where receivers forward."""
    behind = ceil(len(each.nodes) / min(demand.senders for demand in demands))
    return behind if kind == "chain" else behind.bit_length()


def _transfers(traffic: Traffic, each: NodeKind) -> int:
    """Large ones into the busiest NIC of a node."""
    counts = [0] * traffic.fabric.nics_per_node
    for piece in each.pieces:
        nic = traffic.fabric.nic(piece.gpu)
        counts[nic] += piece.bytes * MINOR >= each.ingress[nic]
    return max(counts, default=0)
