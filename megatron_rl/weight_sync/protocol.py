"""What trainer ranks, engines and the coordinator say to each other during a sync. Plain, picklable values.

    PREPARE   engines stop serving (from here on an engine serves nothing until COMMIT)
    TRANSFER  trainer ranks send packed buckets, workers write them straight into live parameters
    VERIFY    for every edge: digest of what the source holds == digest of what the destination then holds live
    COMMIT    the version advances, the prefix cache is dropped, serving resumes

Each sync has an epoch number; buckets carry it, so that late ones are fenced. Writes are in place: a failed epoch
leaves an engine DISCARDED, and only a full sync brings it back (the trainer no longer holds the old version).
No torch here: the driver needs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Literal, Protocol

from megatron_rl.weight_sync.manifest import Destination, Edge, EdgeKey, Source
from megatron_rl.weight_sync.tiles import CanonicalTensor

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class LaneSpec:
    """Who is on a lane and where they meet. Plain values: it travels by RPC."""

    source: int
    """Trainer rank; rank 0 of the lane and host of its store."""
    address: str
    """The source's address inside the job."""
    port: int
    receivers: tuple[str, ...]
    """Names of the receiving workers in lane order; receiver i is rank 1 + i."""
    backend: Backend

    @property
    def members(self) -> tuple[str, ...]:
        return (f"trainer rank {self.source}", *self.receivers)

    def plain(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_plain(values: dict) -> LaneSpec:
        return LaneSpec(**{**values, "receivers": tuple(values["receivers"])})


class EngineState(Enum):
    """Whether an engine may serve."""

    EMPTY = "empty"
    """Dummy weights: nothing was committed yet."""
    SERVING = "serving"
    UPDATING = "updating"
    """Between PREPARE and COMMIT."""
    DISCARDED = "discarded"
    """An epoch failed: its weights are a mixture."""


class SyncError(RuntimeError):
    """A sync failed; nothing was committed. The message names who failed or is missing."""


class NotServing(RuntimeError):
    """A request reached an engine that holds no committed version."""


@dataclass(frozen=True)
class TransferReport:
    """What one trainer rank sent, or what one rollout worker received."""

    member: str
    digests: dict[EdgeKey, int] = field(default_factory=dict)
    """Digest of each edge's elements, in [0, 2^64)."""
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class SyncReport:
    """One committed sync."""

    version: int
    epoch: int
    nbytes: int
    """Bytes that travelled, all edges together."""
    seconds: dict[str, float]
    """prepare, transfer, verify, commit, total; and the slowest member's pack, send, receive, digest."""


class TrainerHandle(Protocol):
    """A training rank, as the coordinator sees it (`sender.WeightSender`, behind a Ray actor or not)."""

    def sync_describe(self) -> Awaitable[Source]: ...

    def sync_open(self, lane: LaneSpec | None, edges: Sequence[Edge], timeout_s: float
                  ) -> Awaitable[dict[EdgeKey, str]]:
        """Answers with `Edge.fingerprint` of each edge as it arrived."""

    def sync_send(self, epoch: int) -> Awaitable[TransferReport]: ...


class EngineHandle(Protocol):
    """A rollout engine, as the coordinator sees it (`rollout.engine.RolloutEngine`, behind a Ray actor or not)."""

    def sync_describe(self, canonical: Sequence[CanonicalTensor]) -> Awaitable[list[Destination]]: ...

    def sync_open(self, lanes: Sequence[LaneSpec], edges: Sequence[Edge], timeout_s: float
                  ) -> Awaitable[dict[EdgeKey, str]]:
        """Answers with `Edge.fingerprint` of each edge as it arrived at its worker."""

    def sync_prepare(self, epoch: int) -> Awaitable[None]: ...

    def sync_receive(self, epoch: int) -> Awaitable[list[TransferReport]]: ...

    def sync_commit(self, epoch: int, version: int) -> Awaitable[None]: ...

    def sync_discard(self, epoch: int, reason: str) -> Awaitable[None]: ...
