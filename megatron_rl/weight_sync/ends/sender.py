"""The trainer's side of a sync: a rank packs what it holds and sends it once, and receivers forward it.

Nothing is gathered, and nothing is called per tensor. Packing, sending and digests overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod

import torch

from launch.fabric.estimate import SENDING
from launch.plan.plan import RankCoordinates
from megatron_rl.layouts.digest import Digester, add, compile_for
from megatron_rl.layouts.tiles import ParamLayout, some
from megatron_rl.weight_sync.plan.buckets import Bucket
from megatron_rl.weight_sync.plan.copies import Source
from megatron_rl.weight_sync.plan.streams import Stream, schedule
from megatron_rl.weight_sync.protocol import (
    EdgeKey,
    Held,
    SyncError,
    SyncPart,
    TransferReport,
    engine_name,
    trainer_name,
)
from megatron_rl.weight_sync.wire.member import Membership
from megatron_rl.weight_sync.wire.packing import buffer_bytes, pack_bucket, source_tiles
from megatron_rl.weight_sync.wire.transport import Deadline, Pending, TransportError


class WeightSender:
    """One trainer rank's end of its lane.

    Args:
        coordinates: this rank's coordinates.
        layouts: this rank's parameters, as tiles.
        parameters: the live parameters by the layouts' names. Every `sync_send` reads them, so they must then hold the
            updated weights (with an overlapped parameter all-gather: force it first).
        address: this rank's address in the job; None uses gloo's default interface.
    """

    def __init__(self, coordinates: RankCoordinates, layouts: Sequence[ParamLayout],
                 parameters: Mapping[str, torch.Tensor], *, address: str | None = None) -> None:
        self._coordinates, self._layouts, self._parameters = coordinates, tuple(layouts), parameters
        self._address = address
        self._name = trainer_name(coordinates.rank)
        self._device = next(iter(parameters.values())).device
        self._member: Membership | None = None
        self._buffers: list[torch.Tensor] = []
        self._digested = _Digested(())
        self._shared = Digester(())

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers that are allocated while the lane is open."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def sync_describe(self) -> Source:
        """Coordinates, layouts and types, for the manifest.

        Raises:
            SyncError: live parameters are empty, or have other elements than their layouts; the message names them.
        """
        wrong = [f"{layout.name} ({list(live.shape)} instead of {list(layout.shape)})" for layout in self._layouts
                 if (live := self._parameters[layout.name]).numel() != prod(layout.shape)
                 or not live.untyped_storage().nbytes()]
        if wrong:
            raise SyncError(f"{self._name} does not hold the elements of {some(wrong)}")
        dtypes = {layout.name: str(self._parameters[layout.name].dtype).removeprefix("torch.")
                  for layout in self._layouts}
        return Source(self._coordinates, self._layouts, dtypes)

    def sync_open(self, part: SyncPart) -> Held:
        """Open this rank's lane, if it has receivers, and keep its streams for all later syncs.

        Raises:
            TransportError: naming the receivers that did not arrive.
        """
        self.close()
        compile_for(self._parameters.values())
        rank = self._coordinates.rank
        self._member = Membership(self._name, part, lambda stream: stream.rank == rank, address=self._address,
                                  device=self._device)
        self._digested = _Digested(self._member.streams)
        names = set(part.shared)
        self._shared = Digester(layout for layout in self._layouts if layout.name in names)
        size = buffer_bytes(self._member.streams)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device)
                         for _ in range(SENDING if size else 0)]
        return self._member.held

    @torch.no_grad()
    def sync_send(self, epoch: int) -> TransferReport:
        """Send every bucket of this rank. Returns when the first receivers have taken them.

        A failed transfer is reported in the report's `error`. The lane is then closed, so that no receiver waits for
        the rest until its deadline.
        """
        if self._member is None:
            return TransferReport(self._name, error="its lanes were never opened")
        try:
            # Ranks that send nothing, or not everything that others hold too, are compared as well.
            with ThreadPoolExecutor(1, thread_name_prefix="shared") as beside:
                shared = beside.submit(self._shared.each, self._parameters)
                return replace(self._send(self._member, epoch), shared=shared.result())
        except TransportError as error:
            self._member.close(f"{self._name} left: {error}")
            return TransferReport(self._name, error=str(error))

    def sync_discard(self, epoch: int, reason: str) -> None:
        """The epoch failed: leave the lane."""
        self.close(f"epoch {epoch} failed: {reason}")

    def close(self, reason: str = "") -> None:
        """Leave the lane."""
        if self._member is not None:
            self._member.close(reason)
        self._buffers = []

    def _send(self, member: Membership, epoch: int) -> TransferReport:
        started = time.perf_counter()
        deadline = Deadline(member.timeout_s)
        free = deque(self._buffers)
        in_flight: deque[tuple[list[Pending], torch.Tensor]] = deque()
        digests = _SourceDigests(self._digested, self._parameters)
        packing = 0.0
        for stream, number in schedule(member.streams):
            lane = member.lane(stream)
            if not free:
                _release(in_flight, free, deadline)
            began = time.perf_counter()
            buffer = free.popleft()
            filled = pack_bucket(stream.buckets[number], number, epoch, self._parameters, buffer, stream.number)
            packing += time.perf_counter() - began
            in_flight.append(([lane.send(stream.number, filled, lane.spec.members.index(engine_name(*receiver)))
                               for receiver in stream.receivers_from(None)], buffer))
            digests.take(stream, number)               # while the bucket travels
        while in_flight:
            _release(in_flight, free, deadline)
        seconds = {"pack": packing, "digest": digests.seconds, "send": time.perf_counter() - started}
        return TransferReport(self._name, digests.by_edge(member.streams),
                              sum(stream.nbytes for stream in member.streams), seconds)


class _Digested:
    """Buckets of a rank's streams that are equal, and their digesters. Computed once."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        same: dict[tuple[Bucket, ...], int] = {}
        self.as_stream = {stream.number: same.setdefault(stream.buckets, stream.number) for stream in streams}
        """Number of a stream -> number of the first stream with equal buckets, as replicas of an engine rank have."""
        self.digesters = {(number, at): Digester(source_tiles(bucket)) for buckets, number in same.items()
                          for at, bucket in enumerate(buckets)}


class _SourceDigests:
    """Digests of what was packed in one sync, by bucket. Equal buckets are digested once."""

    def __init__(self, digested: _Digested, parameters: Mapping[str, torch.Tensor]) -> None:
        self._digested, self._parameters = digested, parameters
        self._of: dict[tuple[int, int], int] = {}
        self.seconds = 0.0

    def take(self, stream: Stream, number: int) -> None:
        key = self._digested.as_stream[stream.number], number
        if key not in self._of:
            began = time.perf_counter()
            self._of[key] = self._digested.digesters[key].total(self._parameters)
            self.seconds += time.perf_counter() - began

    def by_edge(self, streams: Sequence[Stream]) -> dict[EdgeKey, int]:
        digests: dict[EdgeKey, int] = {}
        for stream in streams:
            first = self._digested.as_stream[stream.number]
            total = add(*(self._of[first, number] for number in range(len(stream.buckets))))
            for key in stream.edges:
                digests[key] = add(digests.get(key, 0), total)
        return digests


def _release(in_flight: deque[tuple[list[Pending], torch.Tensor]], free: deque[torch.Tensor],
             deadline: Deadline) -> None:
    sends, buffer = in_flight.popleft()
    for pending in sends:
        pending.wait(deadline)
    free.append(buffer)
