"""Streams: what a training rank sends once and receivers forward, bucket by bucket. Integers and strings, no torch.

A stream is a range of what one shard sends to one kind of engine worker. All its receivers hold the same tiles, so they
receive identical buckets, and a receiver forwards a bucket without looking into it.
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
"""(sender: a training rank or an engine rank, receiver)."""


class Hop(NamedTuple):
    """One copy of a stream's bytes from one member to another."""

    sender: EngineRank | None
    """None: the stream's training rank."""
    receiver: EngineRank


@dataclass(frozen=True)
class Stream:
    """Bytes of one training rank, and the hops that bring them to their receivers."""

    number: int
    rank: int
    """The training rank that packs them."""
    slot: int
    """Order among the streams of that rank. Streams with equal slots alternate bucket by bucket."""
    nbytes: int
    hops: tuple[Hop, ...]
    """A receiver's own hop comes before the hops in which it sends."""
    buckets: tuple[Bucket, ...] = ()
    """() in an outline."""

    @property
    def receivers(self) -> tuple[EngineRank, ...]:
        return tuple(hop.receiver for hop in self.hops)

    @property
    def edges(self) -> tuple[EdgeKey, ...]:
        """The source and each final destination, however the bytes get there."""
        return tuple((self.rank, *receiver) for receiver in self.receivers)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Sender and receiver, hop by hop."""
        return tuple((self.rank if hop.sender is None else hop.sender, hop.receiver) for hop in self.hops)

    def sender_of(self, receiver: EngineRank) -> EngineRank | None:
        return next(hop.sender for hop in self.hops if hop.receiver == receiver)

    def receivers_from(self, sender: EngineRank | None) -> tuple[EngineRank, ...]:
        return tuple(hop.receiver for hop in self.hops if hop.sender == sender)

    def outline(self) -> Stream:
        """The stream without buckets, for members that are not on it."""
        return replace(self, buckets=())

    def fingerprint(self) -> str:
        """Equal streams have equal fingerprints. Every member on it reports it before the first byte."""
        return digest_of([self.encode_outline(), hash_buckets(self.buckets)])

    def encode_outline(self) -> list:
        hops = [[list(hop.sender) if hop.sender else None, list(hop.receiver)] for hop in self.hops]
        return [self.number, self.rank, self.slot, self.nbytes, hops]

    def encode(self) -> dict:
        """A plain form for msgpack or JSON. `decode` is the inverse."""
        return {"outline": self.encode_outline(), "buckets": [bucket.encode() for bucket in self.buckets]}

    @classmethod
    def decode(cls, plain: Mapping) -> Stream:
        number, rank, slot, nbytes, hops = plain["outline"]
        return cls(number, rank, slot, nbytes,
                   tuple(Hop(tuple(sender) if sender else None, tuple(receiver)) for sender, receiver in hops),
                   tuple(Bucket.decode(bucket) for bucket in plain["buckets"]))


def schedule(streams: Iterable[Stream]) -> Iterator[tuple[Stream, int]]:
    """The one order of all buckets of a sync, as (stream, number of the bucket). Slots follow each other, so that two
    senders do not use one receiver's NIC at the same time. The streams of a slot alternate bucket by bucket, so that
    all their receivers have something to forward."""
    for _, group in groupby(sorted(streams, key=lambda stream: (stream.slot, stream.number)),
                            key=lambda stream: stream.slot):
        together = list(group)
        for number in range(max(len(stream.buckets) for stream in together)):
            for stream in together:
                if number < len(stream.buckets):
                    yield stream, number


def turns(streams: Iterable[Stream]) -> dict[Pair, tuple[int, ...]]:
    """For each pair of members: the streams of the buckets between them, in the order in which both issue them. A
    communicator without tags matches messages in this order.

    There is no deadlock, because every bucket depends only on earlier buckets in `schedule` (those that its link
    carries before it, the one two before it that has its buffer) or on the same bucket one hop earlier.
    """
    between: dict[Pair, list[Stream]] = {}
    for stream in streams:
        for pair in stream.pairs:
            between.setdefault(pair, []).append(stream)
    return {pair: tuple(stream.number for stream, _ in schedule(shared)) for pair, shared in between.items()}


def route_fingerprint(streams: Sequence[Stream]) -> str:
    """Fingerprint of all senders, receivers and sizes of all streams, equal for a manifest and for its outline."""
    return digest_of([stream.encode_outline() for stream in streams])


def hash_buckets(buckets: Sequence[Bucket]) -> str:
    return digest_of([bucket.encode() for bucket in buckets])


def digest_of(plain: list) -> str:
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()[:16]
