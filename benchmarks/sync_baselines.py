"""Common ways to sync weights, on the same ranks, workers, transport and threads: all tensors are gathered on trainer
rank 0 and broadcast from there to all rollout ranks: per tensor, per packed bucket, or per packed bucket in a pipelined
ring. Nothing is verified.

gloo's broadcast waits for a whole message before a member passes it on. NCCL's is a ring in which every rank passes
slices on as they arrive (its buffer of 4 MiB has 8 steps): `ring` does that, host after host, so that a NIC carries one
copy in and one out. It is the fair one of the three."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.layouts.hf_write import in_groups
from megatron_rl.layouts.tiles import CanonicalTensor, ParamLayout, Tile, contiguous_stride, tile_view
from megatron_rl.stores import tcp_store
from megatron_rl.sync_bench.rank import TrainerRank
from megatron_rl.sync_bench.worker import RolloutWorker
from megatron_rl.weight_sync.plan.copies import Destination
from megatron_rl.weight_sync.plan.manifest import Edge
from megatron_rl.weight_sync.wire.packing import HEADER_BYTES, buffer_bytes, pack_bucket, unpack_bucket
from megatron_rl.weight_sync.wire.transport import Deadline, Group, gloo_group

RANK, WORKER = "benchmarks.sync_baselines:GatheringRank", "benchmarks.sync_baselines:BroadcastWorker"
IN_FLIGHT = 2
"""Broadcasts in flight: one is packed or unpacked while the next is sent."""
SLICE = 512 << 10
"""Bytes of a message in the ring: a step of NCCL's buffer."""
SLICES_IN_FLIGHT = 8
"""The steps of that buffer."""


@dataclass(frozen=True)
class Meeting:
    """The meeting point of a group's members, at the address of member 0."""

    address: str
    port: int
    size: int
    timeout_s: float

    def join(self, member: int, address: str) -> Group:
        """A process group with the options of our own links: one gloo device with one thread on this host's NIC."""
        timeout = timedelta(seconds=self.timeout_s)
        store = tcp_store(self.address, self.port, host=member == 0, timeout=timeout)
        return gloo_group(dist.PrefixStore(f"port{self.port}", store), member, self.size, timeout,
                          dist.ProcessGroupGloo.create_device(hostname=address))


def whole_tensors(canonical: Sequence[CanonicalTensor], dtype: str) -> Destination:
    """A destination that holds every tensor whole. Rank 0 gathers into it."""
    layouts = tuple(ParamLayout(each.name, each.shape, (Tile(each.name, (0,) * len(each.shape), each.shape,
                                                             contiguous_stride(each.shape), 0),)) for each in canonical)
    return Destination(0, 0, layouts, {each.name: dtype for each in canonical}, {})


class GatheringRank(TrainerRank):
    """A training rank that can also take part in the gather. Rank 0 broadcasts."""

    def __init__(self, architecture, training, rank: int, dtype: str, address: str, device: str) -> None:
        super().__init__(architecture, training, rank, dtype, address, device)
        self._rank, self._dtype, self._address = rank, getattr(torch, dtype), address

    def gather_open(self, meeting: Meeting, member: int | None, edges: Sequence[Edge],
                    canonical: Sequence[CanonicalTensor]) -> None:
        """Join the gather; `member` None: this rank sends nothing. `edges` are what this rank sends or, on rank 0, what
        each member sends."""
        self._edges, self._deadline_s, self._canonical = edges, meeting.timeout_s, canonical
        if self._rank == 0:
            self._full = {each.name: torch.empty(each.shape, dtype=self._dtype) for each in canonical}
        if member is not None:
            self._gathering = meeting.join(member, self._address)

    def gather(self) -> None:
        """Gather every tensor on rank 0."""
        deadline = Deadline(self._deadline_s)
        if self._rank:
            for edge in self._edges:
                self._give(edge, deadline)
            return
        streams = []
        for member, edge in enumerate(self._edges):
            buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8)
            streams.append(self._take(member, edge, buffer, deadline))
        while streams:
            streams = [stream for stream in streams if next(stream, None) is not None]

    def _give(self, edge: Edge, deadline: Deadline) -> None:
        waiting = []
        for number, bucket in enumerate(edge.buckets):
            buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8)
            message = pack_bucket(bucket, number, 0, self.parameters, buffer)
            waiting.append((self._gathering.send([message], 0, 0), buffer))
            if len(waiting) > IN_FLIGHT:
                waiting.pop(0)[0].wait(deadline.timedelta())
        for work, _ in waiting:
            work.wait(deadline.timedelta())

    def _take(self, member: int, edge: Edge, buffer: torch.Tensor, deadline: Deadline) -> Iterator[bool]:
        """Receive the buckets of one rank, one per step, so that all ranks send at the same time."""
        for number, bucket in enumerate(edge.buckets):
            part = buffer[:HEADER_BYTES + bucket.nbytes]
            if member == 0:
                pack_bucket(bucket, number, 0, self.parameters, buffer)
            else:
                work = self._gathering.recv([part], member, 0)
                yield True
                work.wait(deadline.timedelta())
            unpack_bucket(bucket, number, 0, part, self._full)

    def broadcast_open(self, meeting: Meeting) -> None:
        self._broadcasting = meeting.join(0, self._address)

    def broadcast_tensors(self) -> None:
        """One broadcast per tensor."""
        deadline = Deadline(self._deadline_s)
        for each in self._canonical:
            broadcast(self._broadcasting, self._full[each.name].view(-1).view(torch.uint8)).wait(deadline.timedelta())

    def broadcast_buckets(self, bucket_bytes: int) -> None:
        """One broadcast per packed bucket. The next bucket is packed while one is sent."""
        deadline, waiting = Deadline(self._deadline_s), []
        for bucket in in_groups(self._canonical, self._dtype, bucket_bytes):
            message = torch.cat([self._full[each.name].view(-1) for each in bucket]).view(torch.uint8)
            waiting.append((broadcast(self._broadcasting, message), message))
            if len(waiting) >= IN_FLIGHT:
                waiting.pop(0)[0].wait(deadline.timedelta())
        for work, _ in waiting:
            work.wait(deadline.timedelta())


    def broadcast_ring(self, bucket_bytes: int) -> None:
        """Send every packed bucket to the first worker, slice by slice."""
        deadline, sending = Deadline(self._deadline_s), deque[tuple[dist.Work, torch.Tensor]]()
        for bucket in in_groups(self._canonical, self._dtype, bucket_bytes):
            message = torch.cat([self._full[each.name].view(-1) for each in bucket]).view(torch.uint8)
            for part in message.split(SLICE):
                sending.append((self._broadcasting.send([part], 1, 0), part))
                while len(sending) >= SLICES_IN_FLIGHT:
                    sending.popleft()[0].wait(deadline.timedelta())
        for work, _ in sending:
            work.wait(deadline.timedelta())


class BroadcastWorker(RolloutWorker):
    """A rollout worker that can also receive whole tensors and keeps its slices."""

    def broadcast_open(self, meeting: Meeting, member: int, address: str, dtype: str,
                       canonical: Sequence[CanonicalTensor]) -> None:
        self._canonical, self._dtype, self._deadline_s = canonical, getattr(torch, dtype), meeting.timeout_s
        self._broadcasting = meeting.join(member, address)
        self._member, self._members = member, meeting.size
        self._parameters = dict(self.model.named_parameters())
        self._slices: dict[str, list[tuple[str, Tile]]] = {}
        for layout in self.layouts:
            for tile in layout.tiles:
                self._slices.setdefault(tile.tensor, []).append((layout.name, tile))

    def broadcast_tensors(self) -> None:
        deadline = Deadline(self._deadline_s)
        for each in self._canonical:
            message = self._buffer([each])
            broadcast(self._broadcasting, message).wait(deadline.timedelta())
            self._keep([each], message)

    def broadcast_buckets(self, bucket_bytes: int) -> None:
        deadline, waiting = Deadline(self._deadline_s), []
        for bucket in in_groups(self._canonical, self._dtype, bucket_bytes):
            message = self._buffer(bucket)
            waiting.append((broadcast(self._broadcasting, message), bucket, message))
            if len(waiting) >= IN_FLIGHT:
                work, arrived, received = waiting.pop(0)
                work.wait(deadline.timedelta())
                self._keep(arrived, received)
        for work, arrived, received in waiting:
            work.wait(deadline.timedelta())
            self._keep(arrived, received)

    def broadcast_ring(self, bucket_bytes: int) -> None:
        """Receive every slice from the member before, pass it on at once, and keep the slices of whole buckets."""
        deadline = Deadline(self._deadline_s)
        arriving = deque[tuple[dist.Work, torch.Tensor, tuple | None]]()
        sending = deque[tuple[dist.Work, torch.Tensor]]()
        coming = self._slices_of(bucket_bytes)

        def receive() -> None:
            for part, whole in coming:
                arriving.append((self._broadcasting.recv([part], self._member - 1, 0), part, whole))
                return

        for _ in range(SLICES_IN_FLIGHT):
            receive()
        while arriving:
            work, part, whole = arriving.popleft()
            work.wait(deadline.timedelta())
            if self._member + 1 < self._members:
                sending.append((self._broadcasting.send([part], self._member + 1, 0), part))
            receive()
            if whole is not None:
                self._keep(*whole)
            while len(sending) > SLICES_IN_FLIGHT:
                sending.popleft()[0].wait(deadline.timedelta())
        for work, _ in sending:
            work.wait(deadline.timedelta())

    def _slices_of(self, bucket_bytes: int) -> Iterator[tuple[torch.Tensor, tuple | None]]:
        """All slices in order; with the last of a bucket, the bucket and its message."""
        for bucket in in_groups(self._canonical, self._dtype, bucket_bytes):
            message = self._buffer(bucket)
            parts = message.split(SLICE)
            yield from ((part, None) for part in parts[:-1])
            yield parts[-1], (bucket, message)

    def _buffer(self, bucket: Sequence[CanonicalTensor]) -> torch.Tensor:
        elements = sum(torch.Size(each.shape).numel() for each in bucket)
        return torch.empty(elements * self._dtype.itemsize, dtype=torch.uint8)

    @torch.no_grad()
    def _keep(self, bucket: Sequence[CanonicalTensor], message: torch.Tensor) -> None:
        values, at = message.view(self._dtype), 0
        for each in bucket:
            size = torch.Size(each.shape).numel()
            whole, at = values[at:at + size].view(each.shape), at + size
            for name, tile in self._slices.get(each.name, []):
                tile_view(self._parameters[name], tile).copy_(whole[tile.slices])


def broadcast(group: Group, message: torch.Tensor) -> dist.Work:
    """Broadcast from member 0 to all others."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([message], options)
