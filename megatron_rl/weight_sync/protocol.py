"""What trainer ranks, engines and the coordinator exchange during a sync, as plain, picklable values.

    PREPARE   engines stop serving (from here on, an engine serves nothing until COMMIT)
    TRANSFER  trainer ranks send packed buckets; workers write them straight into live parameters and forward them
    VERIFY    for every edge: the digest of what the source holds == the digest of what the destination then holds live;
              for every parameter that several trainer ranks hold: the same digest on all of them
    COMMIT    the version advances, the prefix cache is dropped, serving resumes

Each sync has an epoch number. Buckets carry it, so that late ones are rejected. Writes are in place: an epoch that
fails after PREPARE leaves an engine DISCARDED, and only a full sync restores it, because the trainer no longer holds
the old version. If an engine died, the others get a new route without it, and the transfer starts again under another
epoch.

With `weight_sync.staging: shadow`, workers write into a second copy, whose digests VERIFY compares, and the engine
serves its old version until COMMIT. Only then does it stop, copy the shadow to the live weights, and digest the live
weights again. An epoch that fails before that leaves the old version whole and served; one that fails later leaves the
engine DISCARDED.

Quantised weights of an engine cannot be written as they arrive. A worker receives such a layer in a buffer, in the form
in which vLLM loads it, digests it there, and has vLLM build the live layer from it. Then another layer takes the
buffer. VERIFY compares the digests of the buffers. A failure leaves the engine DISCARDED, as above.
No torch here, because the driver does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from launch.fabric.seated import EngineRank
from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.weight_sync.plan.copies import Destination, Source
from megatron_rl.weight_sync.plan.layers import LayerPlan
from megatron_rl.weight_sync.plan.streams import EdgeKey, Stream

Backend = Literal["gloo", "nccl"]
Staging = Literal["in_place", "shadow"]
TAGGED: tuple[Backend, ...] = ("gloo",)
"""Backends that match messages by tag."""
CONNECT_S = 10.0
"""Time limit for two members that are both present to connect. Nothing interrupts gloo or NCCL during this: a member
that closes its lanes leaves the attempt behind."""


def trainer_name(rank: int) -> str:
    return f"trainer rank {rank}"


def engine_name(replica: int, worker: int | None = None) -> str:
    return f"engine {replica}" if worker is None else f"engine {replica} worker {worker}"


def member_name(member: int | EngineRank) -> str:
    """Name of a training rank, or of a worker: (replica, worker)."""
    return trainer_name(member) if isinstance(member, int) else engine_name(*member)


def vllm_backend(staging: Staging) -> str:
    """Name of the weight transfer engine that vLLM has to use."""
    return f"megatron_rl_{staging}"


class Link(NamedTuple):
    """A communicator of two members, for everything that one sends to the other."""

    sender: int
    """Number of the member on the lane."""
    receiver: int
    round: int = 0
    """When it is opened (`launch.fabric.rounds`)."""


@dataclass(frozen=True)
class LaneSpec:
    """The members of a lane, their meeting point, and the links between them, as plain values for RPC."""

    source: int
    """Trainer rank: member 0 of the lane and host of its store."""
    address: str
    """The source's address in the job."""
    port: int
    receivers: tuple[str, ...]
    """Names of the workers that its streams reach. Receiver i is member 1 + i."""
    backend: Backend
    links: tuple[Link, ...] = ()
    """Two workers with streams of several sources between them share the link that the first of their lanes opens."""

    @property
    def members(self) -> tuple[str, ...]:
        return (trainer_name(self.source), *self.receivers)

    def plain(self) -> list:
        return [self.source, self.address, self.port, list(self.receivers), self.backend,
                [list(link) for link in self.links]]

    @staticmethod
    def from_plain(plain: Sequence) -> LaneSpec:
        source, address, port, receivers, backend, links = plain
        return LaneSpec(source, address, port, tuple(receivers), backend, tuple(Link(*link) for link in links))


@dataclass(frozen=True)
class SyncPart:
    """What a member gets before the first sync: the whole route, and its own share of it."""

    lanes: tuple[LaneSpec, ...]
    """Lanes of all members. Links of one round are opened in this order."""
    streams: tuple[Stream, ...]
    """All streams of the route, with buckets at least for those that the member is on."""
    timeout_s: float
    """Deadline of a transfer."""
    open_timeout_s: float
    """Deadline of opening the lanes."""
    epoch: int = 0
    """The last epoch before these lanes."""
    line: tuple[str, int] | None = None
    """Where the coordinator's `AbortLine` listens; None: there is none."""
    token: str = field(default="", repr=False)
    """Token of that line."""
    shared: tuple[str, ...] = ()
    """Names of a trainer rank's parameters that other ranks hold too."""
    layers: LayerPlan = LayerPlan((), ())
    """A worker's quantised layers."""

    def plain(self) -> bytes:
        """For calls that only carry simple values. It is opaque: vLLM gives all workers of an engine the parts of all,
        and each decodes only its own."""
        plain = {"lanes": [lane.plain() for lane in self.lanes], "streams": [each.encode() for each in self.streams],
                 "timeout_s": self.timeout_s, "open_timeout_s": self.open_timeout_s, "epoch": self.epoch,
                 "line": list(self.line) if self.line else None, "token": self.token,
                 "layers": [list(self.layers.order), list(self.layers.buffers)]}
        return json.dumps(plain, separators=(",", ":")).encode()

    @staticmethod
    def from_plain(data: bytes) -> SyncPart:
        plain = json.loads(data)
        return SyncPart(tuple(map(LaneSpec.from_plain, plain["lanes"])), tuple(map(Stream.decode, plain["streams"])),
                        plain["timeout_s"], plain["open_timeout_s"], plain["epoch"],
                        tuple(plain["line"]) if plain["line"] else None, plain["token"],
                        layers=LayerPlan(*map(tuple, plain["layers"])))


@dataclass(frozen=True)
class Held:
    """What a member received as its part, for comparison with the manifest before the first byte."""

    member: str
    route: str
    """`route_fingerprint` of all streams."""
    streams: dict[int, str]
    """`Stream.fingerprint` of the streams that the member is on."""


class EngineState(Enum):
    """Whether an engine may serve."""

    EMPTY = "empty"
    """Dummy weights: nothing has been committed yet."""
    SERVING = "serving"
    UPDATING = "updating"
    """Between PREPARE and COMMIT; with a shadow, during COMMIT."""
    DISCARDED = "discarded"
    """An epoch failed: the weights are a mixture, or a version that was not committed."""


class SyncError(RuntimeError):
    """A sync failed, and nothing was committed. The message names the members that failed or are missing."""


class NotServing(RuntimeError):
    """A request reached an engine that holds no committed version."""


@dataclass(frozen=True)
class TransferReport:
    """What one trainer rank sent, or what one rollout worker received."""

    member: str
    digests: dict[EdgeKey, int] = field(default_factory=dict)
    """Digest of each edge's elements, in [0, 2^64)."""
    nbytes: int = 0
    """Bytes packed and sent, or received."""
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    forwarded: int = 0
    """Bytes forwarded to other workers."""
    arrivals: dict[str, float] = field(default_factory=dict)
    """Name of each member that this worker receives from -> seconds until its last bucket had arrived."""
    shared: dict[str, int] = field(default_factory=dict)
    """Digest of each of a trainer rank's `SyncPart.shared`."""


@dataclass(frozen=True)
class SyncReport:
    """One committed sync."""

    version: int
    epoch: int
    nbytes: int
    """Bytes sent over all edges."""
    seconds: dict[str, float]
    """prepare, transfer, verify, commit, total; the slowest member's pack, send, receive, digest; and `pause`, the
    longest time that an engine served nothing."""
    lost: tuple[str, ...] = ()
    """Engines that died during this sync. The others continued without them."""
    arrivals: dict[tuple[str, str], float] = field(default_factory=dict)
    """(sender, receiver) of each hop, by name -> seconds until its last bucket had arrived."""
    requantised: int = 0
    """Part of `nbytes` that engines quantised. The rest was written in place."""


class TrainerHandle(Protocol):
    """A training rank, as the coordinator sees it (`sender.WeightSender`, behind a Ray actor or not)."""

    def sync_describe(self) -> Awaitable[Source]: ...

    def sync_open(self, part: SyncPart) -> Awaitable[Held]: ...

    def sync_send(self, epoch: int) -> Awaitable[TransferReport]: ...

    def sync_discard(self, epoch: int, reason: str) -> Awaitable[None]:
        """The epoch failed: leave the lanes. A member that does not answer is lost."""


class EngineHandle(Protocol):
    """A rollout engine, as the coordinator sees it (`rollout.weights.EngineWeights`, behind a Ray actor or not)."""

    def sync_describe(self, canonical: Sequence[CanonicalTensor]) -> Awaitable[list[Destination]]: ...

    def sync_open(self, part: SyncPart) -> Awaitable[list[Held]]:
        """Returns what each worker holds, by worker."""

    def sync_prepare(self, epoch: int) -> Awaitable[None]: ...

    def sync_receive(self, epoch: int) -> Awaitable[list[TransferReport]]: ...

    def sync_commit(self, epoch: int, version: int) -> Awaitable[float]:
        """Returns the seconds for which the engine served nothing."""

    def sync_discard(self, epoch: int, reason: str) -> Awaitable[None]:
        """The epoch failed: leave the lanes, and serve nothing unless an older version is whole. An engine that does
        not answer is lost."""
