"""Streams: what a training rank sends once and receivers pass on, bucket by bucket. Integers and strings, no torch.

A stream is a range of what one shard gives to one sort of engine worker. Everybody on it holds the same tiles, so all
receive the identical buckets, and a receiver forwards a bucket without looking inside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from launch.fabric.seated import EngineRank
from megatron_rl.weight_sync.plan.buckets import Bucket

EdgeKey = tuple[int, int, int]
"""(trainer rank, replica, worker)."""
Pair = tuple[int | EngineRank, EngineRank]
"""(sender: a training rank or an engine's, receiver)."""


class Hop(NamedTuple):
    """One copy of a stream's bytes from a member to another."""

    sender: EngineRank | None
    """None: the stream's training rank."""
    receiver: EngineRank


@dataclass(frozen=True)
class Stream:
    """Bytes of one training rank, and the hops in which they reach their receivers."""

    number: int
    rank: int
    """Of the training rank that packs them."""
    slot: int
    """Order among the streams of that rank; equal slots take turns bucket by bucket."""
    nbytes: int
    hops: tuple[Hop, ...]
    """A receiver's own hop comes before those in which it sends."""
    buckets: tuple[Bucket, ...] = ()
    """() in an outline."""

    @property
    def receivers(self) -> tuple[EngineRank, ...]:
        return tuple(hop.receiver for hop in self.hops)

    @property
    def edges(self) -> tuple[EdgeKey, ...]:
        """Whose elements end up where, whoever passed them on."""
        return tuple((self.rank, *receiver) for receiver in self.receivers)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Who sends to whom, hop by hop."""
        return tuple((self.rank if hop.sender is None else hop.sender, hop.receiver) for hop in self.hops)

    def sender_of(self, receiver: EngineRank) -> EngineRank | None:
        return next(hop.sender for hop in self.hops if hop.receiver == receiver)

    def receivers_from(self, sender: EngineRank | None) -> tuple[EngineRank, ...]:
        return tuple(hop.receiver for hop in self.hops if hop.sender == sender)

    def outline(self) -> Stream:
        """Without the buckets: what members that are not on it need to know."""
        return replace(self, buckets=())

    def fingerprint(self) -> str:
        """Equal streams, equal fingerprint: every member on it reports it before the first byte."""
        return digest_of([self.encode_outline(), hash_buckets(self.buckets)])

    def encode_outline(self) -> list:
        hops = [[list(hop.sender) if hop.sender else None, list(hop.receiver)] for hop in self.hops]
        return [self.number, self.rank, self.slot, self.nbytes, hops]

    def encode(self) -> dict:
        """A plain form for msgpack or JSON; `decode` inverts it."""
        return {"outline": self.encode_outline(), "buckets": [bucket.encode() for bucket in self.buckets]}

    @classmethod
    def decode(cls, plain: Mapping) -> Stream:
        number, rank, slot, nbytes, hops = plain["outline"]
        return cls(number, rank, slot, nbytes,
                   tuple(Hop(tuple(sender) if sender else None, tuple(receiver)) for sender, receiver in hops),
                   tuple(Bucket.decode(bucket) for bucket in plain["buckets"]))


def schedule(streams: Iterable[Stream]) -> Iterator[tuple[Stream, int]]:
    """The one order of all buckets of a sync, as (stream, number of the bucket): slot after slot, so that two senders
    do not hit one receiver's network card at once; the streams of a slot take turns bucket by bucket, so that all
    their receivers have something to pass on."""
    for _, group in groupby(sorted(streams, key=lambda stream: (stream.slot, stream.number)),
                            key=lambda stream: stream.slot):
        together = list(group)
        for number in range(max(len(stream.buckets) for stream in together)):
            for stream in together:
                if number < len(stream.buckets):
                    yield stream, number


def turns(streams: Iterable[Stream]) -> dict[Pair, tuple[int, ...]]:
    """For each pair of members: the streams of the buckets between the two, in the order in which both issue them. A
    communicator that has no tags matches messages in this order.

    Nobody waits in a circle: whatever a bucket waits for (its own arrival, those that its link carries before it, the
    one two before it that has its buffer) comes before it in `schedule`, or is the same bucket one hop earlier.
    """
    between: dict[Pair, list[Stream]] = {}
    for stream in streams:
        for pair in stream.pairs:
            between.setdefault(pair, []).append(stream)
    return {pair: tuple(stream.number for stream, _ in schedule(shared)) for pair, shared in between.items()}


def route_fingerprint(streams: Sequence[Stream]) -> str:
    """Of who sends how much to whom, all streams together; the same for a manifest and for its outline."""
    return digest_of([stream.encode_outline() for stream in streams])


def hash_buckets(buckets: Sequence[Bucket]) -> str:
    return digest_of([bucket.encode() for bucket in buckets])


def digest_of(plain: list) -> str:
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()[:16]
