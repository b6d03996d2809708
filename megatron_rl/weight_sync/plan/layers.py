"""Through which buffer each quantised layer of a worker is received, and in which order they are quantised. Integers
and strings, no torch.

A quantised layer arrives in a buffer, in the form in which vLLM loads it. As soon as it is complete it is quantised
into the live tensors, and a later layer takes the buffer. Layers whose bytes arrive at the same time need a buffer
each: streams of one slot have a layer each, and two streams may share one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

from megatron_rl.weight_sync.plan.buckets import Bucket, Copy
from megatron_rl.weight_sync.plan.streams import Stream


@dataclass(frozen=True)
class LayerPlan:
    """The quantised layers of one worker."""

    order: tuple[str, ...]
    """In which they are quantised: the same on all TP ranks of an engine, because a scale may be reduced over them."""
    buffers: tuple[int, ...]
    """Number of the buffer through which each of them is received. A layer waits until the one before it in the same
    buffer is quantised."""

    @property
    def count(self) -> int:
        """Number of buffers."""
        return 1 + max(self.buffers, default=-1)


def layer_of(parameter: str) -> str:
    """The layer (vLLM's module) that a parameter belongs to."""
    return parameter.rpartition(".")[0]


def by_layer(bucket: Bucket, quantised: Collection[str]) -> Iterator[tuple[str | None, tuple[Copy, ...]]]:
    """A bucket's copies in the order in which they are written: first those into parameters that are written in place,
    as (None, copies), then those of each quantised layer, as (layer, copies)."""
    in_place = tuple(copy for copy in bucket.copies if copy.destination not in quantised)
    if in_place:
        yield None, in_place
    others = (copy for copy in bucket.copies if copy.destination in quantised)
    for layer, copies in groupby(others, key=lambda copy: layer_of(copy.destination)):
        yield layer, tuple(copies)


def plan_layers(streams: Sequence[Sequence[Stream]], quantised: Collection[str]) -> tuple[LayerPlan, ...]:
    """The plans of all TP ranks of an engine, by TP rank.

    Nobody waits in a circle. All that is written has a place in one order: (slot, bucket, part of the bucket, stream).
    A layer is complete, on all TP ranks, at the place of its last part on any of them. It takes a buffer whose layer
    before is complete at an earlier place. So whatever waits for a buffer waits for earlier places only, and for
    buckets that arrive whether or not those at the same place in other streams were written.

    Args:
        streams: those of each worker.
        quantised: names of the parameters of quantised layers.
    """
    names = frozenset(quantised)
    places = [sorted(((stream.slot, number, part, stream.number), layer)
                     for stream in mine for number, bucket in enumerate(stream.buckets)
                     for part, (layer, _) in enumerate(by_layer(bucket, names)) if layer is not None)
              for mine in streams]
    complete: dict[str, tuple[int, ...]] = {}
    for of_worker in places:
        for place, layer in of_worker:
            complete[layer] = max(place, complete.get(layer, place))
    order = tuple(sorted(complete, key=complete.__getitem__))
    return tuple(LayerPlan(order, _assign(of_worker, complete, order)) for of_worker in places)


def _assign(places: Sequence[tuple[tuple[int, ...], str]], complete: Mapping[str, tuple[int, ...]],
            order: Sequence[str]) -> tuple[int, ...]:
    """The buffer of each layer. One that the same stream has used is preferred, so that streams wait less for each
    other."""
    taken: dict[str, int] = {}
    free_at: list[tuple[int, ...]] = []
    user: list[int] = []
    for place, layer in places:
        if layer in taken:
            continue
        free = [number for number, at in enumerate(free_at) if at < place]
        number = next((each for each in free if user[each] == place[-1]), free[0] if free else len(free_at))
        if number == len(free_at):
            free_at.append(place)
            user.append(place[-1])
        free_at[number], user[number], taken[layer] = complete[layer], place[-1], number
    return tuple(taken[layer] for layer in order)


def slots_by_layers(streams: Sequence[Stream], quantised: Collection[str], stages: Mapping[int, int]
                    ) -> tuple[Stream, ...]:
    """The streams in other slots, so that few layers are incomplete at once, in the order of the route. Of the streams
    to an engine, those that carry parts of the same layers share a slot, and those of different pipeline stages do not.

    Without this, a route may bring the shares of several training TP ranks, or those of the engine's TP ranks, one
    after the other, so that all layers of a stage are incomplete. Or it may bring all stages at once.

    Args:
        stages: the pipeline stage of each training rank.
    """
    names = frozenset(quantised)
    layers: dict[int, frozenset[str]] = {}
    of_engine: dict[int, dict[int, Stream]] = defaultdict(dict)
    for stream in streams:
        if id(stream.buckets) not in layers:        # replicas share the object
            layers[id(stream.buckets)] = frozenset(layer_of(copy.destination) for bucket in stream.buckets
                                                   for copy in bucket.copies if copy.destination in names)
        for replica, _ in stream.receivers:
            of_engine[replica][stream.number] = stream
    together = {stream.number: stream.number for stream in streams}

    def group(number: int) -> int:
        while together[number] != number:
            number = together[number]
        return number

    for carried in of_engine.values():
        for one, other in combinations(carried.values(), 2):
            ours, theirs = layers[id(one.buckets)], layers[id(other.buckets)]
            if (2 * len(ours & theirs) > min(len(ours), len(theirs))        # more than the layer in which a range ends
                    or (one.slot, stages[one.rank]) == (other.slot, stages[other.rank])):
                first, second = sorted((group(one.number), group(other.number)))
                together[second] = first
    starts: dict[int, tuple[int, int]] = {}
    for stream in streams:
        place = stream.slot, stream.number
        starts[group(stream.number)] = min(place, starts.get(group(stream.number), place))
    slots = {each: slot for slot, each in enumerate(sorted(starts, key=starts.__getitem__))}
    return tuple(replace(stream, slot=slots[group(stream.number)]) for stream in streams)
