"""The sync manifest: which member sends which bytes to which, in which buckets, over which hops. It is pure and
deterministic, and holds integers and strings.

It is built once at start-up from the layouts of all training ranks and all rollout workers, and from their places.
`copies` decides what is sent, `launch.fabric` decides the route, and this module turns both into streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from launch.fabric.estimate import Kind
from launch.fabric.routes import ROOT, Route, build
from launch.fabric.seated import EngineRank, Seats, apart, seated
from megatron_rl.weight_sync.plan.buckets import Bucket, pack, part_of
from megatron_rl.weight_sync.plan.copies import Copies, Destination, Source, intersect_sides
from megatron_rl.weight_sync.plan.layers import slots_by_layers
from megatron_rl.weight_sync.plan.streams import EdgeKey, Hop, Pair, Stream, digest_of, hash_buckets, route_fingerprint

DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class Edge:
    """All elements of one training rank that one rollout worker receives, directly or through others."""

    rank: int
    replica: int
    worker: int
    buckets: tuple[Bucket, ...]

    @property
    def key(self) -> EdgeKey:
        return self.rank, self.replica, self.worker

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

@dataclass(frozen=True)
class SyncManifest:
    """Every stream of a sync."""

    bucket_bytes: int
    kind: Kind
    """Kind of the route."""
    streams: tuple[Stream, ...]
    """Stream n is streams[n]."""
    requantised: tuple[str, ...] = ()
    """Names of the engine parameters that are received in vLLM's loader form and quantised
    (`Destination.requantised`). All others are written as they are."""

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Source and destination of all elements, sorted by (replica, worker, rank)."""
        buckets: dict[EdgeKey, list[tuple[Bucket, ...]]] = defaultdict(list)
        for stream in self.streams:
            for key in stream.edges:
                buckets[key].append(stream.buckets)
        joined: dict[tuple[int, ...], tuple[Bucket, ...]] = {}       # replicas share the object
        for parts in buckets.values():
            joined.setdefault(tuple(map(id, parts)), parts[0] if len(parts) == 1 else sum(parts, ()))
        return tuple(Edge(*key, joined[tuple(map(id, buckets[key]))])
                     for key in sorted(buckets, key=lambda key: (*key[1:], key[0])))

    @property
    def total_bytes(self) -> int:
        """Bytes that all receivers take in, including forwarded bytes."""
        return sum(stream.nbytes * len(stream.hops) for stream in self.streams)

    @cached_property
    def requantised_bytes(self) -> int:
        """Part of `total_bytes` that engines quantise. The rest is written in place."""
        names = set(self.requantised)
        counted: dict[int, int] = {}
        for stream in self.streams:
            counted.setdefault(id(stream.buckets), sum(     # replicas share the object
                copy.nbytes for bucket in stream.buckets for copy in bucket.copies if copy.destination in names))
        return sum(counted[id(stream.buckets)] * len(stream.hops) for stream in self.streams)

    def bytes_per_hop(self) -> dict[Pair, int]:
        """(training rank or forwarding engine rank, receiver) -> bytes between the two."""
        sent: dict[Pair, int] = defaultdict(int)
        for stream in self.streams:
            for pair in stream.pairs:
                sent[pair] += stream.nbytes
        return dict(sent)

    @cached_property
    def outlines(self) -> tuple[Stream, ...]:
        """All streams without their buckets."""
        return tuple(stream.outline() for stream in self.streams)

    @cached_property
    def streams_of(self) -> dict[int | EngineRank, tuple[Stream, ...]]:
        """Training rank or engine rank -> the streams that it is on, by number."""
        on: dict[int | EngineRank, list[Stream]] = defaultdict(list)
        for stream in self.streams:
            on[stream.rank].append(stream)
            for receiver in stream.receivers:
                on[receiver].append(stream)
        return {member: tuple(streams) for member, streams in on.items()}

    def part_of_rank(self, rank: int) -> tuple[Stream, ...]:
        """All streams, with the buckets of those that this training rank packs."""
        return self._part([rank])

    def part_of_engine(self, replica: int) -> tuple[Stream, ...]:
        """All streams, with the buckets of those that a worker of this engine is on."""
        return self._part([member for member in self.streams_of
                           if not isinstance(member, int) and member[0] == replica])

    def _part(self, members: Iterable[int | EngineRank]) -> tuple[Stream, ...]:
        part = list(self.outlines)
        for member in members:
            for stream in self.streams_of.get(member, ()):
                part[stream.number] = stream
        return tuple(part)

    def route_fingerprint(self) -> str:
        """Fingerprint of the streams and hops. Every member computes it from its own part."""
        return route_fingerprint(self.streams)

    def fingerprint(self) -> str:
        """Equal manifests have equal fingerprints. For logs and run records."""
        return digest_of([self.bucket_bytes, list(self.stream_fingerprints().values()), list(self.requantised)])

    def stream_fingerprints(self) -> dict[int, str]:
        """`Stream.fingerprint` of every stream. The coordinator compares them with those that the members report."""
        # Replicas share their buckets (the same object), so each is hashed once.
        hashes = {id(stream.buckets): stream.buckets for stream in self.streams}
        hashed = {key: hash_buckets(buckets) for key, buckets in hashes.items()}
        return {stream.number: digest_of([stream.encode_outline(), hashed[id(stream.buckets)]])
                for stream in self.streams}


def build_manifest(sources: Iterable[Source], destinations: Iterable[Destination],
                   bucket_bytes: int = DEFAULT_BUCKET_BYTES, aliases: Mapping[str, str] | None = None, *,
                   route: Kind = "direct", seats: Seats | None = None,
                   gone: Collection[int] = ()) -> SyncManifest:
    """Intersect the layouts of both sides, route the copies and pack them.

    Args:
        sources: all training ranks.
        destinations: all workers of the rollout engines that are left.
        bucket_bytes: maximum size of a message. Larger tensors are split.
        aliases: canonical tensor -> the tensor to take its values from if no source holds it. A rollout engine that
            keeps its own head for a model with tied embeddings needs
            `{"lm_head.weight": "model.embed_tokens.weight"}`. An engine that ties them asks for the embedding once.
        route: see `launch.fabric.routes`.
        seats: place of every member; None puts every training rank and every engine on a node of its own.
        gone: training ranks that can no longer send.

    Raises:
        UserError: the two sides keep a parameter in different types.
        ValueError: no source holds an element that a destination needs, replicas differ, engines differ in what they
            quantise, or all holders of a shard are gone.

    `prove_coverage` (coverage.py) then proves the result without trusting this function.
    """
    sources, destinations = list(sources), list(destinations)
    quantising = {destination.requantised for destination in destinations}
    if len(quantising) > 1:
        raise ValueError("the engines' workers do not all quantise the same parameters: "
                         + "; ".join(sorted(", ".join(names) or "none" for names in quantising)))
    copies = intersect_sides(sources, destinations, aliases, gone)
    seats = seats or apart(copies.training.gpus, copies.workers)
    requantised = next(iter(quantising), ())
    streams = _streams(route_of(copies, route, bucket_bytes, seats), copies, seats, bucket_bytes)
    if requantised:
        streams = slots_by_layers(streams, requantised, {each.coordinates.rank: each.coordinates.pp
                                                         for each in sources})
    return SyncManifest(bucket_bytes, route, streams, requantised)


def route_of(copies: Copies, kind: Kind, chunk_bytes: int, seats: Seats) -> Route:
    """The edges between places that the copies are sent over."""
    traffic = seated(copies.flows(), copies.training, seats, copies.ranks, copies.workers)
    return build(traffic, kind, chunk_bytes)


def _streams(route: Route, copies: Copies, seats: Seats, bucket_bytes: int) -> tuple[Stream, ...]:
    """One stream per edge that leaves a training rank, with all edges behind it as its hops."""
    rank_at = {place: rank for rank, place in enumerate(seats.training) if rank in copies.ranks}
    worker_at = {seats.rollout[key]: key for key in copies.workers}
    packed: dict[tuple, tuple[Bucket, ...]] = {}
    hops: list[list[Hop]] = []
    roots: list[int] = []
    stream_of: dict[int, int] = {}
    for number, edge in enumerate(route.edges):
        if edge.parent == ROOT:
            stream_of[number] = len(roots)
            roots.append(number)
            hops.append([Hop(None, worker_at[edge.destination])])
        else:
            stream_of[number] = stream_of[edge.parent]
            hops[stream_of[number]].append(Hop(worker_at[edge.source], worker_at[edge.destination]))
    streams = []
    for number, root in enumerate(roots):
        edge = route.edges[root]
        key = edge.shard, edge.worker, edge.first_byte, edge.bytes
        if key not in packed:
            part = part_of(copies.of_flow[edge.shard, edge.worker], edge.first_byte, edge.bytes)
            packed[key] = pack(part, bucket_bytes)
        nbytes = sum(bucket.nbytes for bucket in packed[key])
        streams.append(Stream(number, rank_at[edge.source], edge.slot, nbytes, tuple(hops[number]), packed[key]))
    return tuple(streams)
