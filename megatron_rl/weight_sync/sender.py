"""The trainer's side of a sync: a rank packs what it already holds and sends it on its own lane.

Nothing is gathered, nothing is called once a tensor. Packing, sending and the digest overlap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from launch.planner.plan import RankCoordinates
from megatron_rl.weight_sync.digest import digest_layouts
from megatron_rl.weight_sync.manifest import Edge, Source
from megatron_rl.weight_sync.protocol import EdgeKey, LaneSpec, TransferReport
from megatron_rl.weight_sync.tiles import ParamLayout
from megatron_rl.weight_sync.transport import Deadline, Lane, Pending, TransportError, open_lane
from megatron_rl.weight_sync.wire import buffer_bytes, pack_bucket, source_tiles

BUFFERS = 4
"""Buckets of one rank in flight: enough to pack for one receiver while others are being sent to."""


class WeightSender:
    """One trainer rank's end of its lane.

    Args:
        coordinates: this rank's.
        layouts: what it holds, as tiles.
        parameters: the live parameters by the layouts' names. They are read at every `sync_send`, so they must hold
            the updated weights then (with an overlapped parameter all-gather: force it first).
        address: this rank's address inside the job; None takes gloo's default interface.
    """

    def __init__(self, coordinates: RankCoordinates, layouts: Sequence[ParamLayout],
                 parameters: Mapping[str, torch.Tensor], *, address: str | None = None) -> None:
        self._coordinates, self._layouts, self._parameters = coordinates, tuple(layouts), parameters
        self._address = address
        self._name = f"trainer rank {coordinates.rank}"
        self._device = next(iter(parameters.values())).device
        self._lane: Lane | None = None
        self._edges: tuple[Edge, ...] = ()
        self._buffers: list[torch.Tensor] = []

    def sync_describe(self) -> Source:
        """Coordinates, layouts and types, for the manifest."""
        dtypes = {layout.name: str(self._parameters[layout.name].dtype).removeprefix("torch.")
                  for layout in self._layouts}
        return Source(self._coordinates, self._layouts, dtypes)

    def sync_open(self, lane: LaneSpec | None, edges: Sequence[Edge], timeout_s: float) -> dict[EdgeKey, str]:
        """Open this rank's lane (None: nobody receives from it) and keep its edges for all later syncs.

        Returns:
            The fingerprints of the edges as this rank holds them.
        Raises:
            TransportError: naming the receivers that did not arrive.
        """
        self._timeout_s = timeout_s
        self._edges = tuple(edges)
        self.close()
        if lane is None:
            return {}
        self._peer = {(edge.replica, edge.worker): 1 + index for index, edge in enumerate(edges)}
        size = buffer_bytes(edges)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)]
        # Replicas receive the same elements: one digest serves the edges that read the same tiles.
        tiles_of = {edge.key: source_tiles(edge) for edge in edges}
        self._digest_groups: dict[tuple[ParamLayout, ...], list[EdgeKey]] = {}
        for key, tiles in tiles_of.items():
            self._digest_groups.setdefault(tiles, []).append(key)
        self._lane = open_lane(lane, 0, timeout_s, address=self._address, device=self._device)
        return {edge.key: edge.fingerprint() for edge in edges}

    @torch.no_grad()
    def sync_send(self, epoch: int) -> TransferReport:
        """Send every bucket of this rank; returns when the receivers have taken them.

        A failed transfer is told in the report's `error`; the lane is closed then, so that no receiver waits for the
        rest until its deadline.
        """
        if not self._edges:
            return TransferReport(self._name)
        if self._lane is None:
            return TransferReport(self._name, error="its lane is closed")
        try:
            return self._send(self._lane, epoch)
        except TransportError as error:
            self.close()
            return TransferReport(self._name, error=str(error))

    def _send(self, lane: Lane, epoch: int) -> TransferReport:
        started = time.perf_counter()
        deadline = Deadline(self._timeout_s)
        free, in_flight = deque(self._buffers), deque()
        packing = 0.0
        for edge, number in self._schedule():
            if not free:
                _release(in_flight, free, deadline)
            began = time.perf_counter()
            buffer = free.popleft()
            filled = pack_bucket(edge.buckets[number], number, epoch, self._parameters, buffer)
            packing += time.perf_counter() - began
            in_flight.append((lane.send(filled, self._peer[edge.replica, edge.worker]), buffer))
        began = time.perf_counter()
        digests = {}
        for tiles, keys in self._digest_groups.items():
            digest = digest_layouts(tiles, self._parameters)
            digests |= dict.fromkeys(keys, digest)
        digesting = time.perf_counter() - began
        while in_flight:
            _release(in_flight, free, deadline)
        seconds = {"pack": packing, "digest": digesting, "send": time.perf_counter() - started}
        return TransferReport(self._name, digests, sum(edge.nbytes for edge in self._edges), seconds)

    def close(self) -> None:
        """Leave the lane."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _schedule(self) -> Iterator[tuple[Edge, int]]:
        """Bucket by bucket over the receivers, each rank starting at another one: a Latin square, so that two
        senders do not hit the same receiver at once."""
        first = self._coordinates.rank % len(self._edges)
        rotated = self._edges[first:] + self._edges[:first]
        for number in range(max(len(edge.buckets) for edge in rotated)):
            for edge in rotated:
                if number < len(edge.buckets):
                    yield edge, number


def _release(in_flight: deque[tuple[Pending, torch.Tensor]], free: deque[torch.Tensor], deadline: Deadline) -> None:
    pending, buffer = in_flight.popleft()
    pending.wait(deadline)
    free.append(buffer)
