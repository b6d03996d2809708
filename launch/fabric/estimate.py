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
from math import ceil, sqrt
from typing import Literal, NamedTuple

from launch.coefficients.sync import SyncCoefficients
from launch.fabric.lanes import Demand, NodeKind, Traffic
from launch.fabric.shards import Shard

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


class Loads(NamedTuple):
    """Bytes of the busiest NIC of each sort, for one route."""

    ingress: int
    """Into a rollout NIC."""
    egress: float
    """Out of a training NIC."""
    relay_egress: int
    """Out of a rollout NIC."""
    nvlink: int
    """Into a GPU of a rollout node from its twins."""
    hops: int
    """NIC hops of the last receiver."""
    streams: int
    """Transfers that a rollout GPU takes in at the same time."""
    transfers: int
    """Into the busiest rollout NIC."""

    @property
    def busiest(self) -> float:
        return max(self.ingress, self.egress, self.relay_egress)


class Times(NamedTuple):
    """Seconds of one route."""

    lower_bound: float
    """Its busiest NIC at line rate."""
    wire: float
    """First byte to last byte."""
    expected: float
    """The whole sync: pause, barriers, wire, packing that nothing overlaps, digest, requantising."""
    chunk_bytes: int


def loads(traffic: Traffic, kind: Kind) -> Loads:
    """Bytes through the busiest NICs."""
    kinds = traffic.kinds
    hops, relays = 1, 0
    for each, demands in zip(kinds, traffic.demands):
        depth, forwards = _depth(each, demands, kind)
        hops = max(hops, depth)
        relays = max(relays, max(each.ingress, default=0) if forwards else 0)
    transfers = max((_transfers(traffic, each) for each in kinds), default=0)
    # With slots the first chunks of the next transfer arrive while the last of this one are unpacked.
    streams = min(2, transfers) if kind == "direct" else transfers * (2 if kind == "tree" and relays else 1)
    return Loads(
        ingress=max((max(each.ingress, default=0) for each in kinds), default=0), egress=_egress(traffic, kind),
        relay_egress=relays, nvlink=max((each.twin_bytes for each in kinds), default=0), hops=hops, streams=streams,
        transfers=transfers)


def times(traffic: Traffic, kind: Kind, coefficients: SyncCoefficients, *, bucket_bytes: int = DEFAULT_BUCKET,
          quantise: bool = False, load: Loads | None = None) -> Times:
    """Seconds of a route; `load` where `loads` is known already."""
    load = load or loads(traffic, kind)
    fabric = traffic.fabric
    rate = fabric.nic_bandwidth * coefficients.nic_efficiency
    nvlink_rate = fabric.nvlink_bandwidth * coefficients.nvlink_efficiency
    chunk = chunk_bytes(kind, load, coefficients.chunk_latency_s, rate, bucket_bytes)
    latency, busiest = coefficients.chunk_latency_s, load.busiest
    chunks = busiest / chunk + load.transfers / 2          # a transfer's last chunk is half full on average
    wire = busiest / rate + chunks * latency + fill_chunks(kind, load.hops) * (chunk / rate + latency)
    if load.nvlink:
        wire = max(wire, load.nvlink / nvlink_rate) + chunk / nvlink_rate
    held = gpu_bytes(load)
    expected = (coefficients.pause_s + coefficients.barrier_s + wire + 2 * chunk / coefficients.copy_rate
                + held / coefficients.digest_rate + (held / coefficients.quantise_rate if quantise else 0.0))
    bound = max(busiest / fabric.nic_bandwidth, load.nvlink / fabric.nvlink_bandwidth)
    return Times(bound, wire, expected, chunk)


def gpu_bytes(load: Loads) -> int:
    """Weights that a rollout GPU holds afterwards (at most): what it digests."""
    return load.ingress + load.nvlink


def swap_seconds(weight_bytes: float, coefficients: SyncCoefficients) -> float:
    """For how long an engine serves nothing that receives into a second copy of its weights: it pauses, copies them
    inside the GPU, digests what is live, and resumes; of the protocol's three barriers it waits for one.

    Args:
        weight_bytes: of one GPU.
    """
    return (coefficients.pause_s + coefficients.barrier_s / 3 + weight_bytes / coefficients.copy_rate
            + weight_bytes / coefficients.digest_rate)


def fill_chunks(kind: Kind, hops: int) -> int:
    """Chunks that pass before the last receiver's pipeline is full."""
    return (hops - 1) * (2 if kind == "tree" else 1)


def chunk_bytes(kind: Kind, load: Loads, latency: float, rate: float, bucket_bytes: int) -> int:
    """The chunk that makes chunks' latency and the pipeline's fill equal, in whole MiB (or 64 KiB, where it is less than
    one), at most a bucket."""
    fill = fill_chunks(kind, load.hops)
    if not fill or not load.busiest:
        return min(bucket_bytes, MIB * ceil(max(1, load.busiest) / MIB))
    best = sqrt(load.busiest * latency * rate / fill)
    step = MIB if best >= MIB else SMALL_STEP
    return min(bucket_bytes, max(1, round(best / step)) * step)


def dealt_whole(each: NodeKind, demands: Sequence[Demand]) -> bool:
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
    for each, demands in zip(traffic.kinds, traffic.demands):
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


def _depth(each: NodeKind, demands: Sequence[Demand], kind: Kind) -> tuple[int, bool]:
    """(NIC hops, whether receivers forward) for nodes of one kind."""
    if kind == "direct":
        return 1, False
    behind = ceil(len(each.nodes) / min(demand.senders for demand in demands))
    hops = behind if kind == "chain" else behind.bit_length()
    return hops, hops > 1


def _transfers(traffic: Traffic, each: NodeKind) -> int:
    """Large ones into the busiest NIC of a node."""
    counts = [0] * traffic.fabric.nics_per_node
    for piece in each.pieces:
        nic = traffic.fabric.nic(piece.gpu)
        counts[nic] += piece.bytes * MINOR >= each.ingress[nic]
    return max(counts, default=0)
