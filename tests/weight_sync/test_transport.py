"""Lanes on real gloo: bytes arrive, the absent are named, nothing waits for ever."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatron_rl.weight_sync.protocol import LaneSpec, Link
from megatron_rl.weight_sync.transport import Deadline, TransportError, open_lane
from tests.ranks import Rank, free_port, run_ranks

RECEIVERS = ("engine 0 worker 0", "engine 0 worker 1")


def _spec(port: int, source: int = 3, receivers: tuple[str, ...] = RECEIVERS) -> LaneSpec:
    """A star: stream i goes to receiver 1 + i."""
    links = tuple(Link(stream, 0, 1 + stream) for stream in range(len(receivers)))
    return LaneSpec(source, "127.0.0.1", port, receivers, "gloo", links)


def _exchange(rank: Rank, port: int) -> list[int]:
    lane = open_lane(_spec(port), rank.rank, 20, address="127.0.0.1")
    deadline = Deadline(20)
    if rank.rank == 0:
        sent = [(torch.full((size,), peer, dtype=torch.uint8), peer) for size in (1, 1 << 20) for peer in (1, 2)]
        for pending in [lane.send(peer - 1, buffer, peer) for buffer, peer in sent]:
            pending.wait(deadline)
        return []
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in (1, 1 << 20)]
    for pending in [lane.receive(rank.rank - 1, buffer, 0) for buffer in buffers]:
        pending.wait(deadline)
    return [int(value) for buffer in buffers for value in (buffer.min(), buffer.max())]


def test_each_receiver_gets_its_own_bytes_in_order():
    assert run_ranks(3, _exchange, free_port(), timeout=40) == [[], [1] * 4, [2] * 4]


def _two_lanes(rank: Rank, ports: tuple[int, int]) -> int:
    """Ranks 0 and 1 are sources of a lane each, rank 2 receives from both at once, on lanes opened in one order."""
    specs = [_spec(ports[source], source, ("engine 0 worker 0",)) for source in (0, 1)]
    if rank.rank < 2:
        lane = open_lane(specs[rank.rank], 0, 20)
        lane.send(0, torch.full((1000,), 10 + rank.rank, dtype=torch.uint8), 1).wait(Deadline(20))
        return 0
    lanes = [open_lane(spec, 1, 20) for spec in specs]
    buffers = [torch.zeros(1000, dtype=torch.uint8) for _ in lanes]
    for pending in [lane.receive(0, buffer, 0) for lane, buffer in zip(lanes, buffers)]:
        pending.wait(Deadline(20))
    return [int(buffer.unique()) for buffer in buffers]


def test_a_worker_receives_on_several_lanes_at_once():
    """vime#329: an engine that keeps one communicator hangs at the second source."""
    assert run_ranks(3, _two_lanes, (free_port(), free_port()), timeout=40)[2] == [10, 11]


def _one_stays_away(rank: Rank, port: int) -> str:
    if rank.rank == 2:
        return ""
    with pytest.raises(TransportError) as caught:
        open_lane(_spec(port), rank.rank, 2)
    return str(caught.value)


def test_who_does_not_join_is_named():
    """verl#6967: one rank that is late must not hang the others without a word."""
    source, present, _ = run_ranks(3, _one_stays_away, free_port(), timeout=40)
    for message in (source, present):
        assert "engine 0 worker 1" in message and "did not join" in message
        assert "engine 0 worker 0 did" not in message


def test_a_source_that_is_not_there_is_named():
    started = time.monotonic()
    with pytest.raises(TransportError, match="trainer rank 3 does not answer"):
        open_lane(_spec(free_port()), 1, 1)
    assert time.monotonic() - started < 10


def _silent_source(rank: Rank, port: int) -> str:
    lane = open_lane(_spec(port, receivers=RECEIVERS[:1]), rank.rank, 20)
    if rank.rank == 0:
        time.sleep(3)                        # a source that is alive and sends nothing
        return ""
    with pytest.raises(TransportError) as caught:
        lane.receive(0, torch.zeros(8, dtype=torch.uint8), 0).wait(Deadline(1))
    return str(caught.value)


def test_a_receive_ends_at_its_deadline_and_says_from_whom():
    """TRL#6797: a receive without a deadline hangs for ever."""
    message = run_ranks(2, _silent_source, free_port(), timeout=40)[1]
    assert "engine 0 worker 0: receive from trainer rank 3 (8 bytes)" in message


def _leaving_receiver(rank: Rank, port: int) -> float:
    lane = open_lane(_spec(port, receivers=RECEIVERS[:1]), rank.rank, 20)
    if rank.rank == 1:
        lane.close()
        return 0.0
    started = time.monotonic()
    with pytest.raises(TransportError, match="send to engine 0 worker 0"):
        for _ in range(100):                 # what fits into the socket's buffer is sent to nobody
            lane.send(0, torch.zeros(1 << 20, dtype=torch.uint8), 1).wait(Deadline(15))
    return time.monotonic() - started


def test_a_member_that_leaves_is_noticed_at_once():
    assert run_ranks(2, _leaving_receiver, free_port(), timeout=40)[0] < 10


def _forwarded(rank: Rank, port: int) -> tuple[int, int]:
    """One stream over a chain of three: the second member takes the next bucket in while it passes the last one on."""
    spec = LaneSpec(3, "127.0.0.1", port, RECEIVERS, "gloo", (Link(5, 0, 1), Link(5, 1, 2)))
    lane, deadline = open_lane(spec, rank.rank, 20), Deadline(20)
    buffers = [torch.full((1 << 20,), value, dtype=torch.uint8) for value in (7, 8)]
    if rank.rank == 0:
        pending = [lane.send(5, buffer, 1) for buffer in buffers]
    elif rank.rank == 1:
        pending = []
        for buffer in buffers:
            lane.receive(5, buffer.zero_(), 0).wait(deadline)
            pending.append(lane.send(5, buffer, 2))
    else:
        pending = [lane.receive(5, buffer.zero_(), 1) for buffer in buffers]
    for each in pending:
        each.wait(deadline)
    with pytest.raises(TransportError, match="stream 5 has no link to"):
        lane.send(5, buffers[0], rank.rank)
    return tuple(int(buffer.float().mean()) for buffer in buffers)


def test_a_receiver_passes_on():
    assert run_ranks(3, _forwarded, free_port(), timeout=40) == [(7, 8)] * 3


def _woken(rank: Rank, port: int) -> tuple[float, str]:
    """Rank 1 closes its lane in a thread while both ends wait on it."""
    lane = open_lane(_spec(port, receivers=RECEIVERS[:1]), rank.rank, 30)
    started = time.monotonic()
    if rank.rank == 1:
        threading.Timer(0.5, lane.close, ["epoch 4 was aborted"]).start()
    with pytest.raises(TransportError) as caught:
        lane.receive(0, torch.zeros(1 << 20, dtype=torch.uint8), 1 - rank.rank).wait(Deadline(25))
    return time.monotonic() - started, str(caught.value)


def test_a_lane_that_is_closed_wakes_who_waits_at_both_ends():
    (far, _), (near, message) = run_ranks(2, _woken, free_port(), timeout=40)
    assert near < 5 and far < 5
    assert message.endswith("epoch 4 was aborted")


def _larger_than_expected(rank: Rank, port: int) -> int:
    lane = open_lane(_spec(port, receivers=RECEIVERS[:1]), rank.rank, 20)
    if rank.rank == 0:
        lane.send(0, torch.ones(1000, dtype=torch.uint8), 1).wait(Deadline(20))
        return 0
    buffer = torch.zeros(1000, dtype=torch.uint8)
    lane.receive(0, buffer, 0, 100).wait(Deadline(20))
    return int(buffer.sum())


def test_a_message_larger_than_expected_does_not_end_the_process():
    """gloo would: it throws in a thread of its own. A bucket out of turn must be told, not die of."""
    assert run_ranks(2, _larger_than_expected, free_port(), timeout=40)[1] == 1000


def test_only_bytes_travel():
    class Never:
        spec, rank = _spec(1), 0

    from megatron_rl.weight_sync.transport import _Transfer

    with pytest.raises(ValueError, match="uint8"):
        _Transfer(Never(), 0, "send to", 1, torch.zeros(4))
