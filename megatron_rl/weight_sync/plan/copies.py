"""What each training shard sends to each kind of engine worker: the intersections of both sides' tiles.

Data- and context-parallel replicas hold the same weights, so a shard is a (pipeline stage, TP rank). Engine ranks with
equal layouts are of one kind. Padding is in no tile and is never sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.errors import UserError
from launch.fabric.shards import Flow, Shard, Worker
from launch.plan.layouts import TrainingLayout
from launch.plan.plan import RankCoordinates
from megatron_rl.layouts.tiles import ParamLayout, Tile, intersect
from megatron_rl.weight_sync.plan.buckets import Copy
from megatron_rl.weight_sync.plan.streams import EngineRank


@dataclass(frozen=True)
class Source:
    """A training rank: its coordinates, its layouts, and the type of each parameter by torch's name ("bfloat16")."""

    coordinates: RankCoordinates
    layouts: tuple[ParamLayout, ...]
    dtypes: Mapping[str, str]


Holding = tuple[int, str]
"""A training rank, and a parameter that it holds."""


def held_alike(sources: Iterable[Source]) -> list[tuple[Holding, ...]]:
    """Parameters that hold the same elements of the checkpoint, on two or more ranks: those of data- and
    context-parallel replicas, norms on all TP ranks, tied embeddings on the first and the last stage."""
    holders: dict[frozenset, list[Holding]] = defaultdict(list)
    for source in sorted(sources, key=lambda source: source.coordinates.rank):
        for layout in source.layouts:
            boxes = frozenset((tile.tensor, *tile.box) for tile in layout.tiles if tile.numel)
            holders[boxes].append((source.coordinates.rank, layout.name))
    return [tuple(alike) for boxes, alike in holders.items() if boxes and len(alike) > 1]


@dataclass(frozen=True)
class Destination:
    """A rollout worker: TP rank `worker` of engine `replica`, with its traced layouts and types."""

    replica: int
    worker: int
    layouts: tuple[ParamLayout, ...]
    dtypes: Mapping[str, str]
    padding: Mapping[str, int]
    """Parameter name -> number of elements that its loader fills with a constant; absent means 0."""
    requantised: tuple[str, ...] = ()
    """Names of the parameters that the engine holds quantised. They are received in buffers, in the layout given here,
    and quantised layer by layer. All others are written in place (or copied, with a shadow)."""


@dataclass(frozen=True)
class Copies:
    """All copies of a sync."""

    training: TrainingLayout
    """Sizes of the whole training world, including ranks that are gone."""
    ranks: tuple[int, ...]
    """The ranks that are left."""
    workers: Mapping[EngineRank, Worker]
    """Every engine rank with its kind: `Worker(number of the kind of engine, TP rank)`."""
    of_flow: Mapping[tuple[Shard, Worker], tuple[Copy, ...]]
    """The copies of each flow, in the order of the destination's parameters."""

    def flows(self) -> tuple[Flow, ...]:
        """Bytes that each shard sends to each kind of worker, for `launch.fabric`."""
        return tuple(Flow(shard, worker, sum(copy.nbytes for copy in copies))
                     for (shard, worker), copies in sorted(self.of_flow.items()))


def intersect_sides(sources: Sequence[Source], destinations: Sequence[Destination],
                    aliases: Mapping[str, str] | None = None, gone: Collection[int] = ()) -> Copies:
    """All copies between two sides. Arguments and errors as in `build_manifest`."""
    held = _holders_of_shards(sources)
    training = TrainingLayout(**{axis: 1 + max(getattr(source.coordinates, axis) for source in sources)
                                 for axis in ("tp", "pp", "cp", "dp")})
    ranks = tuple(sorted(source.coordinates.rank for source in sources if source.coordinates.rank not in gone))
    for shard, holders in held.items():
        if not any(source.coordinates.rank in ranks for source in holders):
            raise ValueError(f"no training rank that holds stage {shard.pp}, TP rank {shard.tp} is left")
    first = _Holders({shard: sources[0] for shard, sources in held.items()})
    workers: dict[EngineRank, Worker] = {}
    sorts: dict[tuple, Worker] = {}
    of_flow: dict[tuple[Shard, Worker], tuple[Copy, ...]] = {}
    for destination in sorted(destinations, key=lambda d: (d.replica, d.worker)):
        # Engines of equal size have equal layouts, so one intersection serves them all.
        key = (destination.worker, destination.layouts, tuple(sorted(destination.dtypes.items())))
        if key not in sorts:
            number = sum(worker.tp == destination.worker for worker in sorts.values())
            sorts[key] = Worker(number, destination.worker)
            size = 1 + max(d.worker for d in destinations if d.replica == destination.replica)
            copies = first.copies_to(_retarget(destination, first, aliases or {}), training.tp, size)
            of_flow |= {(shard, sorts[key]): tuple(part) for shard, part in copies.items()
                        if any(copy.nbytes for copy in part)}
        workers[destination.replica, destination.worker] = sorts[key]
    return Copies(training, ranks, workers, of_flow)


def _holders_of_shards(sources: Iterable[Source]) -> dict[Shard, list[Source]]:
    """Shard -> the training ranks that hold it, in rank order."""
    held: dict[Shard, list[Source]] = defaultdict(list)
    for source in sorted(sources, key=lambda source: source.coordinates.rank):
        held[Shard(source.coordinates.pp, source.coordinates.tp)].append(source)
    if not held:
        raise ValueError("a manifest needs at least one training rank")
    for first, *others in held.values():
        for other in others:
            if first.layouts != other.layouts or first.dtypes != other.dtypes:
                raise ValueError(f"training ranks {first.coordinates.rank} and {other.coordinates.rank} are replicas "
                                 "of one another, but their layouts or types differ")
    return dict(sorted(held.items()))


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
    """A tile in a parameter of a shard's holders."""

    shard: Shard
    param: str
    tile: Tile
    dtype: str


class _Holders:
    """The shards that hold each box of each canonical tensor."""

    def __init__(self, shards: Mapping[Shard, Source]) -> None:
        stage_of: dict[str, int] = {}
        self.boxes: dict[str, dict[tuple, list[_Held]]] = defaultdict(dict)
        for shard, source in shards.items():
            for layout in source.layouts:
                for tile in layout.tiles:
                    # Tied embeddings are on the first and the last stage. The first one sends them.
                    if stage_of.setdefault(tile.tensor, shard.pp) == shard.pp:
                        self.boxes[tile.tensor].setdefault(tile.box, []).append(
                            _Held(shard, layout.name, tile, source.dtypes[layout.name]))

    def copies_to(self, destination: Destination, tp: int, engine_tp: int) -> dict[Shard, list[Copy]]:
        """Shard -> its copies, in the order of the destination's parameters."""
        copies: dict[Shard, list[Copy]] = defaultdict(list)
        # Every TP rank has the norms. A worker takes them from the rank that sends it its matrices.
        near = destination.worker * tp // engine_tp
        for layout in destination.layouts:
            for tile in layout.tiles:
                covered = 0
                for held_alike in self.boxes.get(tile.tensor, {}).values():
                    held = min(held_alike, key=lambda held: abs(held.shard.tp - near))
                    common = intersect(held.tile, tile)
                    if common is None:
                        continue
                    _check_dtype(held, layout.name, destination.dtypes[layout.name])
                    ours, theirs = common
                    copies[held.shard].append(Copy(held.param, ours, layout.name, theirs, held.dtype))
                    covered += theirs.numel
                if covered != tile.numel:
                    raise ValueError(f"{layout.name} of rollout worker {destination.worker} needs {tile.numel} "
                                     f"elements of {tile.tensor} from {tile.start}, the trainer holds {covered}")
        return copies


def _check_dtype(held: _Held, param: str, dtype: str) -> None:
    if held.dtype != dtype:
        raise UserError(f"the trainer keeps {held.param} in {held.dtype}, but the rollout engine {param} in {dtype}",
                        where="trainer.dtype, rollout.dtype", fix="give both sides the same type")
