"""Measures one lane of the real transport between two processes: its rate, and the fixed cost of a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megatron_rl.weight_sync.protocol import LaneSpec, Link
from megatron_rl.weight_sync.wire.opening import open_lanes
from megatron_rl.weight_sync.wire.transport import Deadline, Links, Pending

SMALL, MANY = 64, 200
THERE, BACK = 0, 1
"""Streams of the two directions."""
LINKS = (Link(0, 1), Link(1, 0))
IN_FLIGHT = 2


class LaneProbe:
    """Runs in two member processes: member 0 sends, member 1 receives."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self._device = torch.device(device)

    def open(self, spec: LaneSpec, member: int, address: str, timeout_s: float) -> None:
        links = Links(spec.members[member], spec.backend, timeout_s, address=address, device=self._device)
        self._lane = open_lanes([spec], spec.members[member], Deadline(timeout_s), links)[spec.source]
        self._member, self._timeout_s = member, timeout_s

    def stream(self, bucket_bytes: int, count: int) -> float:
        """Send `count` buckets one way, two in flight. Returns the seconds."""
        deadline = Deadline(self._timeout_s)
        waiting: list[Pending] = []
        buffers = [torch.zeros(bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(IN_FLIGHT)]
        start = self._lane.receive if self._member else self._lane.send
        peer, started = 0 if self._member else 1, time.perf_counter()
        for number in range(count):
            if len(waiting) == IN_FLIGHT:
                waiting.pop(0).wait(deadline)
            waiting.append(start(THERE, buffers[number % IN_FLIGHT], peer))
        for each in waiting:
            each.wait(deadline)
        return time.perf_counter() - started

    def small(self) -> float:
        """Seconds for one small bucket one way: half of a round trip."""
        buffer, deadline = torch.zeros(SMALL, dtype=torch.uint8, device=self._device), Deadline(self._timeout_s)
        turns: list[tuple[Callable[[int, torch.Tensor, int], Pending], int]]
        turns = [(self._lane.send, THERE), (self._lane.receive, BACK)]
        if self._member:
            turns = [(self._lane.receive, THERE), (self._lane.send, BACK)]
        peer, started = 0 if self._member else 1, time.perf_counter()
        for _ in range(MANY):
            for start, stream in turns:
                start(stream, buffer, peer).wait(deadline)
        return (time.perf_counter() - started) / MANY / 2
