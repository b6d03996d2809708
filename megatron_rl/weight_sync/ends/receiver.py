"""The receiving side of a sync, without vLLM: buckets arrive, are forwarded, and are written into parameters.

Each stream has a seat while it runs: a thread, two buffers, and its own links. A bucket with the right header is sent
to the next receivers at once. While it is being sent, it is written, the written elements are digested, and the next
bucket arrives in the other buffer. Bytes of a quantised layer are written into a buffer of the layer (`layer_buffers`)
instead of live parameters. Streams of one slot run at the same time, because they may wait for each other's senders,
and so do those of the next slot, which begin while the last of the slot before end. Later streams take over their
seats (`launch.fabric.staging.seats`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from launch.fabric.estimate import RECEIVING
from launch.fabric.staging import Staged, seats
from megatron_rl.layouts.digest import Digester, add, compile_for
from megatron_rl.weight_sync.ends.layer_buffers import LayerBuffers
from megatron_rl.weight_sync.plan.buckets import Bucket
from megatron_rl.weight_sync.plan.layers import by_layer
from megatron_rl.weight_sync.plan.streams import EdgeKey, EngineRank, Stream
from megatron_rl.weight_sync.protocol import Held, SyncPart, TransferReport, engine_name, trainer_name
from megatron_rl.weight_sync.wire.member import Membership
from megatron_rl.weight_sync.wire.packing import (
    HEADER_BYTES,
    WireError,
    buffer_bytes,
    check_header,
    destination_tiles,
    poison,
    unpack_bucket,
)
from megatron_rl.weight_sync.wire.transport import Deadline, Lane, Pending, TransportError


class WeightReceiver:
    """One rollout worker's end of all lanes that it is on.

    Args:
        me: (replica, worker).
        parameters: the parameters to write, live or a second copy, by the names of the destination layouts.
        layers: where the parameters of quantised layers are written instead.
        address: this process's address in the job; None uses gloo's default interface.
    """

    def __init__(self, me: EngineRank, parameters: Mapping[str, torch.Tensor], *, layers: LayerBuffers | None = None,
                 address: str | None = None) -> None:
        self.me, self.name = me, engine_name(*me)
        self._parameters, self._layers, self._address = parameters, layers, address
        self._device = next(iter(parameters.values())).device
        self._member: Membership | None = None
        self._inlets: list[_Inlet] = []
        self._seats: list[_Seat] = []

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers that are allocated while the lanes are open."""
        return sum(buffer.nbytes for seat in self._seats for buffer in seat.buffers)

    def open(self, part: SyncPart) -> Held:
        """Join the lanes and keep the streams for all later syncs.

        Raises:
            TransportError: naming the members that did not arrive.
        """
        self.close()
        compile_for(self._parameters.values())
        self._member = Membership(self.name, part, lambda stream: self.me in stream.receivers, address=self._address,
                                  device=self._device)
        if self._layers is not None:
            self._layers.open(part.layers)
        self._inlets = [_Inlet(self.me, stream, self._member.lane(stream), self._layers)
                        for stream in in_order(self._member.streams)]
        self._seats = [self._seat([self._inlets[number] for number in numbers])
                       for numbers in seats_of([inlet.stream for inlet in self._inlets])]
        return self._member.held

    def _seat(self, inlets: list[_Inlet]) -> _Seat:
        size = buffer_bytes([inlet.stream for inlet in inlets])
        return _Seat(inlets, [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(RECEIVING)],
                     torch.cuda.Stream(self._device) if self._device.type == "cuda" else None)

    @torch.no_grad()
    def receive(self, epoch: int) -> TransferReport:
        """Receive and forward this epoch's buckets, and quantise the layers that need it.

        Raises:
            TransportError, WireError: the first failure. The lanes are then closed, so that no member waits for more.
        """
        started = time.perf_counter()
        if self._member is None or self._member.closed is not None:
            if self._layers is not None:
                self._layers.give_up()
            raise TransportError(self._member.closed if self._member else "its lanes were never opened")
        results = self._run_all(self._member, epoch)
        digests: dict = {}
        arrivals: dict[str, float] = {}
        for inlet, result in zip(self._inlets, results, strict=True):
            key = (inlet.stream.rank, *self.me)
            digests[key] = add(digests.get(key, 0), result.digest)
            arrivals[inlet.sender] = max(arrivals.get(inlet.sender, 0.0), result.arrived - started)
        return TransferReport(
            self.name, digests, sum(inlet.stream.nbytes for inlet in self._inlets),
            {"receive": time.perf_counter() - started, "unpack": sum(r.unpacking for r in results),
             "live_digest": sum(r.digesting for r in results)},
            forwarded=sum(inlet.stream.nbytes * len(inlet.children) for inlet in self._inlets), arrivals=arrivals)

    def digests(self, parameters: Mapping[str, torch.Tensor]) -> dict[EdgeKey, int]:
        """Digests of each edge's elements, as `parameters` hold them now. Not for quantised layers."""
        found: dict[EdgeKey, int] = {}
        for inlet in self._inlets:
            key = (inlet.stream.rank, *self.me)
            found[key] = add(found.get(key, 0), *(part.digester.total(parameters)
                                                 for parts in inlet.parts for part in parts))
        return found

    def close(self, reason: str = "") -> None:
        """Leave all lanes."""
        if self._member is not None:
            self._member.close(reason)
        self._seats = []

    def _run_all(self, member: Membership, epoch: int) -> list[_Taken]:
        if not self._inlets:
            return []
        deadline, failures, taken = Deadline(member.timeout_s), list[Exception](), dict[_Inlet, _Taken]()
        if self._layers is not None:
            self._layers.begin()

        def leave(error: Exception) -> None:
            failures.append(error)                      # the first of them is the cause
            member.close(f"{self.name} left: {error}")
            if self._layers is not None:
                self._layers.fail()

        def run(seat: _Seat) -> None:
            try:
                with torch.no_grad(), torch.cuda.stream(seat.cuda) if seat.cuda is not None else nullcontext():
                    for inlet in seat.inlets:
                        taken[inlet] = inlet.run(epoch, self._parameters, seat.buffers, deadline)
            except Exception as error:
                leave(error)

        seats = self._seats
        if not seats:
            if self._layers is not None:
                self._layers.give_up()
            raise TransportError(member.closed or "its lanes are closed")
        with ThreadPoolExecutor(len(seats), thread_name_prefix="stream") as pool:
            running = [pool.submit(run, seat) for seat in seats]
            if self._layers is not None:
                self._layers.quantise_all(deadline, lambda: member.closed is not None, leave)
            for each in running:
                each.result()
        if failures:
            raise failures[0]
        return [taken[inlet] for inlet in self._inlets]


@dataclass(frozen=True)
class _Seat:
    """What the streams of a seat need while they run, one after the other."""

    inlets: list[_Inlet]
    buffers: list[torch.Tensor]
    """A pair."""
    cuda: torch.cuda.Stream | None
    """Its own CUDA stream, so that streams of the sync overlap, and the same one in every sync. One that was taken anew
    from torch's pool would sooner or later be one on which a message waits for this very stream."""


@dataclass(frozen=True)
class _Part:
    """The copies of a bucket into one quantised layer, or into all parameters that are written in place."""

    bucket: Bucket
    """With these copies only."""
    layer: str | None
    digester: Digester
    nbytes: int


@dataclass(frozen=True)
class _Taken:
    """Result of one stream."""

    digest: int
    unpacking: float
    digesting: float
    arrived: float
    """Time at which its last bucket had arrived (`time.perf_counter`)."""


class _Inlet:
    """One stream at one receiver."""

    def __init__(self, me: EngineRank, stream: Stream, lane: Lane, layers: LayerBuffers | None) -> None:
        self.stream, self._lane, self._layers = stream, lane, layers
        members = lane.spec.members
        sender = stream.sender_of(me)
        self.sender = trainer_name(stream.rank) if sender is None else engine_name(*sender)
        self._from = members.index(self.sender)
        self.children = [members.index(engine_name(*receiver)) for receiver in stream.receivers_from(me)]
        self.parts = [_parts(bucket, frozenset() if layers is None else layers.names) for bucket in stream.buckets]

    def run(self, epoch: int, parameters: Mapping[str, torch.Tensor], buffers: list[torch.Tensor],
            deadline: Deadline) -> _Taken:
        arriving: deque[tuple[Pending, torch.Tensor]] = deque()
        for number, buffer in enumerate(buffers[:len(self.stream.buckets)]):
            arriving.append(self._receive(number, buffer))
        digest, unpacking, digesting, arrived = 0, 0.0, 0.0, time.perf_counter()
        for number, bucket in enumerate(self.stream.buckets):
            pending, buffer = arriving.popleft()
            pending.wait(deadline)
            arrived = time.perf_counter()
            try:
                check_header(bucket, number, epoch, buffer, self.stream.number)
            except WireError as error:
                raise WireError(f"from {self._lane.spec.members[self._from]}: {error}") from error
            used = buffer[:HEADER_BYTES + bucket.nbytes]
            sends = [self._lane.send(self.stream.number, used, child) for child in self.children]
            for part in self.parts[number]:
                written = parameters
                if self._layers is not None and part.layer is not None:
                    written = self._layers.take(part.layer, deadline)
                began = time.perf_counter()
                unpack_bucket(part.bucket, number, epoch, buffer, written, self.stream.number)
                unpacked = time.perf_counter()
                digest = add(digest, part.digester.total(written))
                unpacking, digesting = unpacking + unpacked - began, digesting + time.perf_counter() - unpacked
                if self._layers is not None and part.layer is not None:
                    self._layers.written(part.layer, part.nbytes)
            for send in sends:
                send.wait(deadline)
            if number + RECEIVING < len(self.stream.buckets):
                arriving.append(self._receive(number + RECEIVING, buffer))
        if buffers[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        return _Taken(digest, unpacking, digesting, arrived)

    def _receive(self, number: int, buffer: torch.Tensor) -> tuple[Pending, torch.Tensor]:
        nbytes = HEADER_BYTES + self.stream.buckets[number].nbytes
        return self._lane.receive(self.stream.number, poison(buffer), self._from, nbytes), buffer


def _parts(bucket: Bucket, quantised: frozenset[str]) -> list[_Part]:
    parts = ((layer, replace(bucket, copies=copies)) for layer, copies in by_layer(bucket, quantised))
    return [_Part(part, layer, Digester(destination_tiles(part)), sum(copy.nbytes for copy in part.copies))
            for layer, part in parts]


def in_order(streams: Sequence[Stream]) -> list[Stream]:
    """The streams of a receiver, as they begin."""
    return sorted(streams, key=lambda stream: (stream.slot, stream.number))


def seats_of(streams: Sequence[Stream]) -> list[tuple[int, ...]]:
    """Numbers of the streams on each seat of their receiver, see `launch.fabric.staging.seats`."""
    return seats([Staged(stream.slot, max((bucket.nbytes for bucket in stream.buckets), default=0))
                  for stream in streams])

