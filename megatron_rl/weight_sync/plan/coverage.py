"""Proof that a manifest writes every element of every rollout parameter exactly once, with the right value.

The proof is independent of how the manifest was built: it uses only the copies and both sides' layouts. It works on
boxes (disjoint, with volumes that add up), never on elements, so a 70B model on 256 ranks takes seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from megatron_rl.layouts.boxes import Box, NotABox, box_text, first_overlap, local_box, subtract
from megatron_rl.layouts.tiles import ParamLayout, Tile, cut, some
from megatron_rl.weight_sync.plan.buckets import ITEM_BYTES, Bucket, Copy
from megatron_rl.weight_sync.plan.copies import Destination, Source
from megatron_rl.weight_sync.plan.manifest import Edge, SyncManifest
from megatron_rl.weight_sync.plan.streams import Stream


class CoverageError(Exception):
    """A gap, a double write, or a copy that does not fit the layouts. This is a software fault, not the user's."""


def prove_coverage(manifest: SyncManifest, sources: Iterable[Source], destinations: Iterable[Destination]) -> None:
    """Raise CoverageError, naming worker, parameter and region, unless all of this holds:

    - every hop of a stream starts at its training rank or at a member that has the bytes by then, and ends at a member
      that does not;
    - every bucket has at most `bucket_bytes`, and its copies are aligned and do not overlap;
    - every copy reads the box that it claims, according to the source's layout, and writes it where the destination's
      layout has it, in the type of both;
    - for each destination parameter, the copies are disjoint and fill it together with the loader's padding, and it is
      not empty;
    - every engine takes every element of the checkpoint that a training rank holds: what is trained is what answers.
      There are no exceptions: an element that several ranks hold (a tied head) is taken from one of them.
    """
    for stream in manifest.streams:
        _prove_hops(stream)
    source_of = {source.coordinates.rank: _Side(source) for source in sources}
    to_worker: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in manifest.edges:
        to_worker[edge.replica, edge.worker].append(edge)

    destinations = list(destinations)
    unknown = to_worker.keys() - {(d.replica, d.worker) for d in destinations}
    if unknown:
        raise CoverageError(f"the manifest sends to workers that do not exist: (replica, worker) {sorted(unknown)}")
    sent_to: dict[int, dict[int, Edge]] = defaultdict(dict)
    proven_buckets: set[int] = set()
    proven_reads: set[tuple] = set()
    proven_workers: set[tuple] = set()
    for destination in destinations:
        edges = to_worker[destination.replica, destination.worker]
        for edge in edges:
            if id(edge.buckets) not in proven_buckets:
                _prove_buckets(edge, manifest.bucket_bytes)
                proven_buckets.add(id(edge.buckets))
            if edge.rank not in source_of:
                raise CoverageError(f"the manifest has rank {edge.rank} send, which does not exist")
            side = source_of[edge.rank]
            if (id(edge.buckets), side.key) not in proven_reads:
                _prove_reads(edge, side)
                proven_reads.add((id(edge.buckets), side.key))
        # Replicas with equal layouts that receive equal buckets need only one proof.
        sent_to[destination.replica].update((id(edge.buckets), edge) for edge in edges)
        key = (destination.layouts, tuple(sorted(destination.dtypes.items())),
               tuple(sorted(destination.padding.items())), frozenset(id(edge.buckets) for edge in edges))
        if key not in proven_workers:
            _prove_worker(destination, [copy for edge in edges for copy in _copies(edge)])
            proven_workers.add(key)
    _prove_taken(source_of, sent_to)


def _prove_taken(source_of: Mapping[int, _Side], sent_to: Mapping[int, Mapping[int, Edge]]) -> None:
    """Every element of the checkpoint that a training rank holds goes to each engine: replica -> id of its buckets ->
    an edge with them."""
    held: dict[str, dict[Box, str]] = defaultdict(dict)         # tensor -> box -> who holds it
    known: set[tuple] = set()
    for rank, side in source_of.items():
        if side.key not in known:
            known.add(side.key)
            for layout in side.layouts.values():
                for tile in layout.tiles:
                    if tile.numel:
                        held[tile.tensor].setdefault(tile.box, f"training rank {rank} holds in {layout.name}")
    proven: set[frozenset[int]] = set()
    for replica, edges in sent_to.items():
        if (key := frozenset(edges)) in proven:
            continue
        proven.add(key)
        taken: dict[str, set[Box]] = defaultdict(set)
        for edge in edges.values():
            for copy in _copies(edge):
                taken[copy.source_tile.tensor].add(copy.source_tile.box)
        left = [f"{tensor}{box_text(rest[0])}, which {holder}" for tensor, boxes in held.items()
                for box, holder in boxes.items() if (rest := subtract(box, taken[tensor]))]
        if left:
            raise CoverageError(f"engine {replica} does not take {some(left, '; ')}")


def _prove_hops(stream: Stream) -> None:
    has: set = {None}
    for hop in stream.hops:
        if hop.sender not in has or hop.receiver in has:
            why = "has the bytes already" if hop.receiver in has else f"receives from {hop.sender}, which has none"
            raise CoverageError(f"stream {stream.number} from rank {stream.rank}: (replica, worker) {hop.receiver} "
                                f"{why}")
        has.add(hop.receiver)


def _copies(edge: Edge) -> Iterator[Copy]:
    return (copy for bucket in edge.buckets for copy in bucket.copies)


class _Side:
    """Look-up of the tiles and types of one rank or worker."""

    def __init__(self, holder: Source | Destination) -> None:
        self.layouts = {layout.name: layout for layout in holder.layouts}
        self.dtypes = holder.dtypes
        self.key = (holder.layouts, tuple(sorted(holder.dtypes.items())))

    def check(self, param: str, part: Tile, dtype: str, where: str) -> None:
        """Check that `part` is a part of one of the parameter's tiles, at its position in the layout."""
        layout = self.layouts.get(param)
        if layout is None:
            raise CoverageError(f"{where}: no parameter {param}")
        if self.dtypes[param] != dtype:
            raise CoverageError(f"{where}: {param} is {self.dtypes[param]}, the copy is {dtype}")
        if not any(_contains(tile, part) and cut(tile, part.start, part.shape) == part for tile in layout.tiles):
            raise CoverageError(f"{where}: {param} does not hold {_text(part)} at offset {part.offset}, stride "
                                f"{part.stride}")


def _prove_buckets(edge: Edge, bucket_bytes: int) -> None:
    for number, bucket in enumerate(edge.buckets):
        where = f"bucket {number} from rank {edge.rank} to engine {edge.replica} worker {edge.worker}"
        if bucket.nbytes > bucket_bytes:
            raise CoverageError(f"{where}: {bucket.nbytes} bytes, at most {bucket_bytes}")
        _prove_bucket(bucket, where)


def _prove_bucket(bucket: Bucket, where: str) -> None:
    end = 0
    for copy in bucket.copies:
        if copy.at < end or copy.at % ITEM_BYTES[copy.dtype]:
            raise CoverageError(f"{where}: {_text(copy.source_tile)} is at byte {copy.at}, expected an aligned "
                                f"offset from {end} on")
        end = copy.at + copy.nbytes
    if end != bucket.nbytes:
        raise CoverageError(f"{where}: copies end at byte {end}, the bucket at {bucket.nbytes}")


def _prove_reads(edge: Edge, side: _Side) -> None:
    for copy in _copies(edge):
        side.check(copy.source, copy.source_tile, copy.dtype, f"source rank {edge.rank}")


def _prove_worker(destination: Destination, copies: Sequence[Copy]) -> None:
    where = f"engine {destination.replica} worker {destination.worker}"
    side = _Side(destination)
    written: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        source, target = copy.source_tile, copy.destination_tile
        if (source.tensor, source.box) != (target.tensor, target.box):
            raise CoverageError(f"{where}: {copy.destination} receives {_text(source)} as {_text(target)}")
        side.check(copy.destination, target, copy.dtype, where)
        written[copy.destination].append(copy)
    for layout in destination.layouts:
        _prove_param(layout, written[layout.name], destination.padding.get(layout.name, 0), where)


def _prove_param(layout: ParamLayout, copies: Sequence[Copy], padding: int, where: str) -> None:
    if not prod(layout.shape):
        raise CoverageError(f"{where}: {layout.name} is empty, so that nothing can be written into it")
    tiles = [_box(layout, tile, where) for tile in layout.tiles]
    writes = [_box(layout, copy.destination_tile, where) for copy in copies]
    for what, boxes in (("described", tiles), ("written", writes)):
        overlap = first_overlap(boxes)
        if overlap:
            raise CoverageError(f"{where}: {layout.name} is {what} twice at {box_text(overlap)}")
    volume = sum(prod(shape) for _, shape in tiles)
    if volume + padding != prod(layout.shape):
        raise CoverageError(f"{where}: the tiles of {layout.name} hold {volume} elements, its padding {padding}, but "
                            f"the parameter {prod(layout.shape)}")
    # Every write is inside a tile and writes are disjoint, so equal volumes leave no gap.
    if sum(prod(shape) for _, shape in writes) != volume:
        gap = next(gap for tile in tiles for gap in subtract(tile, writes))
        raise CoverageError(f"{where}: nothing writes {layout.name} at {box_text(gap)}")


def _box(layout: ParamLayout, tile: Tile, where: str) -> Box:
    try:
        return local_box(layout.shape, tile)
    except NotABox as error:
        raise CoverageError(f"{where}: {_text(tile)} of {layout.name} {error}") from error


def _contains(tile: Tile, part: Tile) -> bool:
    return tile.tensor == part.tensor and all(
        a <= b and b + m <= a + n for a, n, b, m in zip(tile.start, tile.shape, part.start, part.shape, strict=True))


def _text(tile: Tile) -> str:
    return tile.tensor + box_text(tile.box)
