"""Bytes through the busiest NICs and expected time of each route, in closed form, for the search.

W bytes go into the busiest rollout NIC at its real rate B. A chunk has c bytes and costs a seconds. With H hops:

    direct   max(in, out)/B + chunks a
    chain    W/B + (W/c) a +   (H - 1)(c/B + a)      c = sqrt(W a B / (H - 1))
    tree     W/B + (W/c) a + 2 (H - 1)(c/B + a)      H = floor(log2 R) + 1: double binary, half the bytes each

These are the usual pipeline formulas; the third is from Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth
broadcast", Parallel Computing 35, 2009. `simulate` computes the same chunk by chunk, and a test compares the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.lanes import Fabric, NodeKind, ShardDemand, Traffic
from launch.fabric.shards import Shard
from launch.plan.book import line, part

Kind = Literal["direct", "chain", "tree"]
KINDS: tuple[Kind, ...] = ("direct", "chain", "tree")
"""From the simplest to the most complex."""
MIB = 1 << 20
SMALL_STEP = MIB // 16
"""Granularity of chunks below 1 MiB."""
DEFAULT_BUCKET = 256 * MIB
SENDING, RECEIVING = 2, 2
"""Chunks in the staging of a training rank, and of a receiver for each concurrent transfer: one is on the wire while
the other is packed, or written and forwarded."""
STAGED_BUCKETS = 6
"""Memory that the planner keeps free for the staging of an engine's rank, in buckets of `weight_sync.bucket_mb`. Chunks
are so small that the buffers of all transfers fit (`RouteCost.most_chunk`)."""
SLACK = 0.001
"""Part of a receiver's time by which a sender may be longer, if whole copies need fewer communicators."""
MINOR = 20
"""A transfer is small if it has less than 1/MINOR of the bytes into its NIC (vocabulary rows at the border of two
ranks)."""


def forwards(cost: RouteCost, value: float) -> bool:
    """Whether receivers forward what they receive."""
    return cost.kind != "direct"


@dataclass(eq=False)
class RouteCost:
    """Prediction for one route: bytes through the busiest NIC of each kind, and seconds."""

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
        """Bytes out of the busiest training NIC."""
        return _egress(self.traffic, self.kind)

    @line("bytes", lambda self: "out of all training NICs: " + (
        "a copy for each rollout node" if self.kind == "direct" else "a copy for each sender's rollout nodes"))
    @part
    def sent_bytes(self) -> int:
        """Bytes out of all training NICs."""
        return sum(demand.bytes * (len(each.nodes) if self.kind == "direct" else min(demand.senders, len(each.nodes)))
                   for each, demands in self.by_kind for demand in demands)

    @line("bytes", "busiest rollout NIC: one copy for its node over its NICs")
    @part
    def rollout_nic_in_bytes(self) -> int:
        return max((max(each.ingress, default=0) for each in self.traffic.kinds), default=0)

    @line("bytes", "into a GPU from engines that share its node")
    @part
    def nvlink_bytes(self) -> int:
        """Bytes between twins of a node, into the busiest GPU."""
        return max((each.twin_bytes for each in self.traffic.kinds), default=0)

    @line("", lambda self: f"NIC hops: receivers / senders{', its log2' if self.kind == 'tree' else ''}",
          written=forwards)
    @part
    def hops(self) -> int:
        """NIC hops to the last receiver."""
        return 1 if self.kind == "direct" else max([1, *(_hops(*each, self.kind) for each in self.by_kind)])

    @line("bytes", "busiest rollout NIC: what it forwards", written=forwards)
    @part
    def rollout_nic_out_bytes(self) -> int:
        """Bytes that the busiest rollout NIC forwards; 0 for `direct`."""
        if self.kind == "direct" or self.hops == 1:
            return 0
        return max(max(each.ingress, default=0)
                   for each, demands in self.by_kind if _hops(each, demands, self.kind) > 1)

    @line("s", "bytes of the busiest NIC / its line rate, or NVLink")
    def lower_bound_s(self) -> float:
        """Time of the route's busiest NIC at line rate."""
        return max(self.busiest / self.fabric.nic_bandwidth, self.nvlink_bytes / self.fabric.nvlink_bandwidth)

    @line("bytes", "sqrt(W a B / fill), or all if no receiver forwards; at most a bucket, or what the staging of all "
                   "large transfers into a GPU leaves each")
    @part
    def chunk_bytes(self) -> int:
        """The chunk size at which the latency of chunks equals the fill of the pipeline, in whole MiB (64 KiB below one
        MiB)."""
        if not self.fill or not self.busiest:
            wanted = MIB * ceil(max(1, self.busiest) / MIB)
        else:
            best = sqrt(self.busiest * self.c.chunk_latency_s * self.rate / self.fill)
            step = MIB if best >= MIB else SMALL_STEP
            wanted = max(1, round(best / step)) * step
        return wanted if wanted <= self.most_chunk else max(SMALL_STEP, self.most_chunk // SMALL_STEP * SMALL_STEP)

    @property
    def most_chunk(self) -> int:
        """Bytes: a bucket, or less if the buffers of all transfers into a GPU would not fit."""
        large, small_bytes = self.staged
        room = STAGED_BUCKETS * self.bucket_bytes // RECEIVING - small_bytes
        return min(self.bucket_bytes, room // max(1, large))

    @part
    def staged(self) -> tuple[int, int]:
        """Transfers into one GPU at the same time, over its NIC and from its twins: (large ones, bytes of the small
        ones)."""
        found = [_staged(self.traffic, each, demands, self.kind, self.hops > 1) for each, demands in self.by_kind]
        return max((large for large, _ in found), default=0), max((small for _, small in found), default=0)

    @line("s", "W/(e B) + (W/c) a + fill (c/(e B) + a); fill = H - 1 (chain), 2 (H - 1) (tree)")
    @part
    def wire_s(self) -> float:
        """Expected time from the first to the last byte."""
        latency, busiest, chunk = self.c.chunk_latency_s, self.busiest, self.chunk_bytes
        chunks = busiest / chunk + self.transfers / 2          # a transfer's last chunk is half full on average
        wire = busiest / self.rate + chunks * latency + self.fill * (chunk / self.rate + latency)
        if self.nvlink_bytes:
            nvlink_rate = self.fabric.nvlink_bandwidth * self.c.nvlink_efficiency
            wire = max(wire, self.nvlink_bytes / nvlink_rate) + chunk / nvlink_rate
        return wire

    @line("bytes", "busiest training GPU: its shard, once as it is sent and once as other ranks hold it",
          shown=round)
    @part
    def trainer_digested_bytes(self) -> float:
        """Bytes that the busiest training GPU digests while it sends."""
        return 2 * _largest_shard(self.traffic)

    @line("s", lambda self: "pause + barriers + max(wire, trainer digested/digest rate"
                            + (", held/quantise rate" if self.quantise else "") + ") + 2 c/copy rate + held/digest rate"
                            + (" + c/quantise rate" if self.quantise else ""), key="seconds")
    @part
    def expected_s(self) -> float:
        """The whole sync: pause, barriers, wire or the trainer's digests, packing and quantising that are not
        overlapped, digest."""
        c, held = self.c, self.rollout_nic_in_bytes + self.nvlink_bytes
        beside = max(self.wire_s, self.trainer_digested_bytes / c.digest_rate)
        after = 2 * self.chunk_bytes / c.copy_rate + held / c.digest_rate
        if self.quantise:       # layer by layer, while others arrive
            beside, after = max(beside, held / c.quantise_rate), after + self.chunk_bytes / c.quantise_rate
        return c.pause_s + c.barrier_s + beside + after

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
        """Chunks before the last receiver's pipeline is full."""
        return (self.hops - 1) * (2 if self.kind == "tree" else 1)

    @property
    def rate(self) -> float:
        return self.fabric.nic_bandwidth * self.c.nic_efficiency


def swap_seconds(weight_bytes: float, coefficients: SyncCoefficients) -> float:
    """Seconds without service of an engine that receives into a second copy of its weights. It pauses, copies the
    weights inside the GPU, digests the live ones, and resumes. It waits for one of the protocol's three barriers.

    Args:
        weight_bytes: bytes on one GPU.
    """
    return (coefficients.pause_s + coefficients.barrier_s / 3 + weight_bytes / coefficients.copy_rate
            + weight_bytes / coefficients.digest_rate)


def dealt_whole(each: NodeKind, demands: Sequence[ShardDemand]) -> bool:
    """Whether the senders of a shard divide its receivers among themselves (`direct`). They do if it costs no time,
    because the receivers divide evenly or the busiest sender finishes before its receivers. Otherwise every sender
    sends a part of every copy. All shards of a kind of node get the same answer, because the two schemes do not share a
    Latin square."""
    receivers, ingress = len(each.nodes), max(each.ingress, default=0)
    return all(receivers % demand.senders == 0 or demand.bytes * MINOR < ingress
               or ceil(receivers / demand.senders) * demand.bytes <= ingress * (1 + SLACK) for demand in demands)


def _egress(traffic: Traffic, kind: Kind) -> float:
    """Bytes out of the busiest training NIC."""
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
    shared = max(1, traffic.fabric.gpus_per_node // traffic.fabric.nics_per_node)
    return _most_of_a_rank(busiest) * min(shared, traffic.training.gpus)


def _largest_shard(traffic: Traffic) -> float:
    """Bytes that the training rank with the largest shard holds."""
    held: dict[Shard, float] = defaultdict(float)
    for demand in (demand for demands in traffic.demands for demand in demands):
        held[demand.shard] += demand.bytes
    copies = sum(held.values()) / traffic.replica_bytes if traffic.replica_bytes else 1.0
    return _most_of_a_rank(held) / copies


def _most_of_a_rank(of_shard: Mapping[Shard, float]) -> float:
    """The most of one rank, which holds a dense shard and one of routed experts of its stage."""
    dense: dict[int, float] = {}
    experts: dict[int, float] = {}
    for shard, number in of_shard.items():
        part = experts if shard.routed else dense
        part[shard.pp] = max(part.get(shard.pp, 0.0), number)
    return max((dense.get(stage, 0.0) + experts.get(stage, 0.0) for stage in {*dense, *experts}), default=0.0)


def _hops(each: NodeKind, demands: Sequence[ShardDemand], kind: Kind) -> int:
    """NIC hops into nodes of one kind if receivers forward."""
    behind = ceil(len(each.nodes) / min(demand.senders for demand in demands))
    return behind if kind == "chain" else behind.bit_length()


def _transfers(traffic: Traffic, each: NodeKind) -> int:
    """Large transfers into the busiest NIC of a node."""
    counts = [0] * traffic.fabric.nics_per_node
    for piece in each.pieces:
        nic = traffic.fabric.nic(piece.gpu)
        counts[nic] += piece.bytes * MINOR >= each.ingress[nic]
    return max(counts, default=0)


def _staged(traffic: Traffic, each: NodeKind, demands: Sequence[ShardDemand], kind: Kind,
            forwards: bool) -> tuple[int, int]:
    """Transfers into the busiest GPU of a node at the same time: (large ones, bytes of the small ones)."""
    large: dict[int, int] = defaultdict(int)
    small: dict[int, int] = defaultdict(int)
    twins = 1
    for piece in each.pieces:
        twins = max(twins, 1 + len(piece.copies))
        minor = piece.bytes * MINOR < each.ingress[traffic.fabric.nic(piece.gpu)]
        for gpu in (piece.gpu, *piece.copies):
            if minor:
                small[gpu] += piece.bytes
            else:
                large[gpu] += 1
    most = max(large.values(), default=0)
    if kind != "direct":
        return most * (2 if kind == "tree" and forwards else 1), max(small.values(), default=0)
    # Two slots, in each of which every twin receives one transfer for all. Small ones come last.
    parts = 1 if dealt_whole(each, demands) else max(demand.senders for demand in demands)
    return min(2 * twins, most * parts), 0
