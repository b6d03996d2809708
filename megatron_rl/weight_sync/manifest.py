"""The sync manifest: who sends which bytes to whom, in which buckets. Pure, deterministic, integers and strings.

Built once at start-up from the layouts of all training ranks and of all rollout workers. A copy is the
intersection of a source tile and a destination tile. Data- and context-parallel replicas hold the same weights;
rollout replica e is served by training replica e mod (DP x CP). Padding lies in no tile and never travels.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.errors import UserError
from launch.planner.plan import RankCoordinates
from megatron_rl.weight_sync.buckets import Bucket, Copy, pack
from megatron_rl.weight_sync.tiles import ParamLayout, Tile, intersect

DEFAULT_BUCKET_BYTES = 256 << 20
EdgeKey = tuple[int, int, int]
"""(trainer rank, replica, worker)."""


@dataclass(frozen=True)
class Source:
    """A training rank: its coordinates, layouts, and the type of each parameter by torch's name ("bfloat16")."""

    coordinates: RankCoordinates
    layouts: tuple[ParamLayout, ...]
    dtypes: Mapping[str, str]


@dataclass(frozen=True)
class Destination:
    """A rollout worker: TP rank `worker` of engine `replica`, its traced layouts and types."""

    replica: int
    worker: int
    layouts: tuple[ParamLayout, ...]
    dtypes: Mapping[str, str]
    padding: Mapping[str, int]
    """Parameter name -> number of elements that its loader fills with a constant; absent means 0."""


@dataclass(frozen=True)
class Edge:
    """All that one training rank sends to one rollout worker, in the order it is sent."""

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

    def fingerprint(self) -> str:
        """Equal edges, equal fingerprint: both its ends report it before the first byte."""
        return _fingerprint(self.key, _hash_buckets(self.buckets))

    def encode(self) -> dict:
        """A plain form for msgpack or JSON; `decode` inverts it."""
        return {"rank": self.rank, "replica": self.replica, "worker": self.worker,
                "buckets": [bucket.encode() for bucket in self.buckets]}

    @classmethod
    def decode(cls, plain: Mapping) -> Edge:
        return cls(plain["rank"], plain["replica"], plain["worker"],
                   tuple(Bucket.decode(bucket) for bucket in plain["buckets"]))


@dataclass(frozen=True)
class SyncManifest:
    """Every edge of a sync, sorted by (replica, worker, rank)."""

    bucket_bytes: int
    edges: tuple[Edge, ...]

    @property
    def total_bytes(self) -> int:
        return sum(edge.nbytes for edge in self.edges)

    def bytes_per_edge(self) -> dict[EdgeKey, int]:
        return {edge.key: edge.nbytes for edge in self.edges}

    def from_rank(self, rank: int) -> tuple[Edge, ...]:
        """What a training rank sends."""
        return tuple(edge for edge in self.edges if edge.rank == rank)

    def to_worker(self, replica: int, worker: int) -> tuple[Edge, ...]:
        """What a rollout worker receives."""
        return tuple(edge for edge in self.edges if (edge.replica, edge.worker) == (replica, worker))

    def encode(self) -> dict:
        return {"bucket_bytes": self.bucket_bytes, "edges": [edge.encode() for edge in self.edges]}

    @classmethod
    def decode(cls, plain: Mapping) -> SyncManifest:
        return cls(plain["bucket_bytes"], tuple(Edge.decode(edge) for edge in plain["edges"]))

    def fingerprint(self) -> str:
        """Equal manifests, equal fingerprint; for logs and run records."""
        text = json.dumps([self.bucket_bytes, list(self.edge_fingerprints().values())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def edge_fingerprints(self) -> dict[EdgeKey, str]:
        """`Edge.fingerprint` of every edge; the coordinator compares them with those that the members report."""
        # Replicas share their buckets (the same object): hash each once.
        hashes: dict[int, str] = {}
        for edge in self.edges:
            if id(edge.buckets) not in hashes:
                hashes[id(edge.buckets)] = _hash_buckets(edge.buckets)
        return {edge.key: _fingerprint(edge.key, hashes[id(edge.buckets)]) for edge in self.edges}


def _hash_buckets(buckets: Sequence[Bucket]) -> str:
    text = json.dumps([bucket.encode() for bucket in buckets], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _fingerprint(key: EdgeKey, buckets_hash: str) -> str:
    return hashlib.sha256(f"{key}:{buckets_hash}".encode()).hexdigest()[:16]


def build_manifest(sources: Iterable[Source], destinations: Iterable[Destination],
                   bucket_bytes: int = DEFAULT_BUCKET_BYTES,
                   aliases: Mapping[str, str] | None = None) -> SyncManifest:
    """Intersect the layouts of both sides and pack the copies.

    Args:
        sources: all training ranks, or at least one whole DP x CP replica.
        destinations: all workers of all rollout engines.
        bucket_bytes: most bytes of a message; larger tensors are split.
        aliases: canonical tensor -> the one to take its values from if no source holds it. A rollout engine that
            keeps a head of its own for a model with tied embeddings needs
            `{"lm_head.weight": "model.embed_tokens.weight"}`; one that ties asks for the embedding once.

    Raises:
        UserError: the two sides keep a parameter in different types.
        ValueError: no source holds an element that a destination needs, or replicas differ among themselves.

    `prove_coverage` (coverage.py) then proves the result without trusting this function.
    """
    replicas = _replicas(sources)
    holders = _Holders(replicas[0])
    packed: dict[tuple, dict[int, tuple[Bucket, ...]]] = {}
    edges = []
    for destination in sorted(destinations, key=lambda d: (d.replica, d.worker)):
        # Engines of equal size have equal layouts: one intersection serves them all.
        key = (destination.worker, destination.layouts, tuple(sorted(destination.dtypes.items())))
        if key not in packed:
            copies = holders.copies_to(_retarget(destination, holders, aliases or {}))
            packed[key] = {slot: pack(copies[slot], bucket_bytes) for slot in sorted(copies)}
        serving = replicas[destination.replica % len(replicas)]
        edges += [Edge(serving[slot].coordinates.rank, destination.replica, destination.worker, buckets)
                  for slot, buckets in packed[key].items() if buckets]
    return SyncManifest(bucket_bytes, tuple(sorted(edges, key=lambda e: (e.replica, e.worker, e.rank))))


def _replicas(sources: Iterable[Source]) -> list[list[Source]]:
    """Training replicas in the order of (dp, cp), each a list of its ranks in the order of (pp, tp)."""
    by_replica: dict[tuple[int, int], list[Source]] = defaultdict(list)
    for source in sorted(sources, key=lambda s: (s.coordinates.pp, s.coordinates.tp)):
        by_replica[source.coordinates.dp, source.coordinates.cp].append(source)
    replicas = [by_replica[key] for key in sorted(by_replica)]
    if not replicas:
        raise ValueError("a manifest needs at least one training rank")
    for replica in replicas[1:]:
        for first, other in zip(replicas[0], replica, strict=True):
            if first.layouts != other.layouts or first.dtypes != other.dtypes:
                raise ValueError(f"training ranks {first.coordinates.rank} and {other.coordinates.rank} are replicas "
                                 "of one another, but their layouts or types differ")
    return replicas


def _retarget(destination: Destination, holders: _Holders, aliases: Mapping[str, str]) -> Destination:
    def rename(tile: Tile) -> Tile:
        if tile.tensor in aliases and tile.tensor not in holders.boxes:
            return replace(tile, tensor=aliases[tile.tensor])
        return tile

    layouts = tuple(ParamLayout(layout.name, layout.shape, tuple(map(rename, layout.tiles)))
                    for layout in destination.layouts)
    return replace(destination, layouts=layouts)


@dataclass(frozen=True)
class _Held:
    """A tile in a parameter of the training rank in `slot` of its replica."""

    slot: int
    param: str
    tile: Tile
    dtype: str


class _Holders:
    """Which ranks of a training replica hold which boxes of each canonical tensor."""

    def __init__(self, replica: Sequence[Source]) -> None:
        stage_of: dict[str, int] = {}
        self.boxes: dict[str, dict[tuple, list[_Held]]] = defaultdict(dict)
        for slot, source in enumerate(replica):
            for layout in source.layouts:
                for tile in layout.tiles:
                    # Tied embeddings live on the first and the last stage: the first one sends.
                    if stage_of.setdefault(tile.tensor, source.coordinates.pp) == source.coordinates.pp:
                        self.boxes[tile.tensor].setdefault(tile.box, []).append(
                            _Held(slot, layout.name, tile, source.dtypes[layout.name]))

    def copies_to(self, destination: Destination) -> dict[int, list[Copy]]:
        """Slot of the sending rank -> its copies, in the order of the destination's parameters."""
        copies: dict[int, list[Copy]] = defaultdict(list)
        for layout in destination.layouts:
            for tile in layout.tiles:
                covered = 0
                for held_alike in self.boxes.get(tile.tensor, {}).values():
                    # Norms lie on every TP rank: worker w takes them from TP rank w mod TP.
                    held = held_alike[destination.worker % len(held_alike)]
                    common = intersect(held.tile, tile)
                    if common is None:
                        continue
                    _check_dtype(held, layout.name, destination.dtypes[layout.name])
                    ours, theirs = common
                    copies[held.slot].append(Copy(held.param, ours, layout.name, theirs, held.dtype))
                    covered += theirs.numel
                if covered != tile.numel:
                    raise ValueError(f"{layout.name} of rollout worker {destination.worker} needs {tile.numel} "
                                     f"elements of {tile.tensor} from {tile.start}, the trainer holds {covered}")
        return copies


def _check_dtype(held: _Held, param: str, dtype: str) -> None:
    if held.dtype != dtype:
        raise UserError(f"the trainer keeps {held.param} in {held.dtype}, the rollout engine {param} in {dtype}",
                        where="trainer.dtype, rollout.dtype", fix="give both sides the same type")
