"""Lanes on real gloo: bytes arrive, the absent are named, nothing waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from launch.fabric.rounds import rounds
from megatron_rl.weight_sync.protocol import LaneSpec, Link
from megatron_rl.weight_sync.wire.opening import open_lanes
from megatron_rl.weight_sync.wire.transport import _GREETING, Deadline, Lane, Links, TransportError
from tests.patience import patient
from tests.ranks import Rank, free_port, run_ranks

RECEIVERS = ("engine 0 worker 0", "engine 0 worker 1")


def _spec(port: int, source: int = 3, receivers: tuple[str, ...] = RECEIVERS) -> LaneSpec:
    """A star."""
    links = tuple(Link(0, 1 + number) for number in range(len(receivers)))
    return LaneSpec(source, "127.0.0.1", port, receivers, "gloo", links)


def _joined(spec: LaneSpec, rank: int, timeout_s: float = 20, turns: dict | None = None) -> Lane:
    links = Links(spec.members[rank], "gloo", timeout_s, turns, address="127.0.0.1")
    return open_lanes([spec], spec.members[rank], Deadline(timeout_s), links)[spec.source]


def _one_stays_away(rank: Rank, port: int) -> str:
    if rank.rank == 2:
        return ""
    with pytest.raises(TransportError) as caught:
        _joined(_spec(port), rank.rank, 2)
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
        _joined(_spec(free_port()), 1, 1)
    assert time.monotonic() - started < 10


def test_an_abort_frees_who_waits_for_a_lane_to_open():
    """Nobody listens; then the source does, and one of the receivers never comes. The deadline is far away."""
    spec, started = _spec(free_port()), time.monotonic()
    waiting = Links(spec.members[1], "gloo", 90, address="127.0.0.1")
    threading.Timer(0.2, waiting.close, ["epoch 4 was aborted"]).start()
    with pytest.raises(TransportError, match="engine 0 worker 0: epoch 4 was aborted"):
        open_lanes([spec], spec.members[1], Deadline(90), waiting)

    ends = [Links(name, "gloo", 90, address="127.0.0.1") for name in spec.members[:2]]
    messages = []

    def join(rank: int) -> None:
        with pytest.raises(TransportError) as caught:
            open_lanes([spec], spec.members[rank], Deadline(90), ends[rank])
        messages.append(str(caught.value))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for links in ends:
        links.close("epoch 5 was aborted")
    for thread in threads:
        thread.join(patient(60))
    assert sorted(message[-20:] for message in messages) == [" epoch 5 was aborted"] * 2
    assert time.monotonic() - started < 45


def _silent_source(rank: Rank, port: int) -> str:
    lane = _joined(_spec(port, receivers=RECEIVERS[:1]), rank.rank)
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
    lane = _joined(_spec(port, receivers=RECEIVERS[:1]), rank.rank)
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
    spec = LaneSpec(3, "127.0.0.1", port, RECEIVERS, "gloo", (Link(0, 1), Link(1, 2)))
    lane, deadline = _joined(spec, rank.rank), Deadline(20)
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
    with pytest.raises(TransportError, match="there is no link from"):
        lane.send(5, buffers[0], rank.rank)
    return tuple(int(buffer.float().mean()) for buffer in buffers)


def test_a_receiver_passes_on():
    assert run_ranks(3, _forwarded, free_port(), timeout=40) == [(7, 8)] * 3


def _woken(rank: Rank, port: int) -> tuple[float, str]:
    """Rank 1 closes its lane in a thread while both ends wait on it."""
    spec = replace(_spec(port, receivers=RECEIVERS[:1]), links=(Link(0, 1), Link(1, 0)))
    lane = _joined(spec, rank.rank, 30)
    started = time.monotonic()
    if rank.rank == 1:
        threading.Timer(0.5, lane.close, ["epoch 4 was aborted"]).start()
    with pytest.raises(TransportError) as caught:
        lane.receive(0, torch.zeros(1 << 20, dtype=torch.uint8), 1 - rank.rank).wait(Deadline(25))
    return time.monotonic() - started, str(caught.value)


def test_a_lane_that_is_closed_wakes_who_waits_at_both_ends():
    (far, told), (near, message) = run_ranks(2, _woken, free_port(), timeout=40)
    assert near < 5 and far < 5
    assert message.endswith("epoch 4 was aborted") and "receive from engine 0 worker 0 (1048576 bytes) failed" in told


class _Blocks:
    """A group as NCCL's can be: every call blocks until another thread aborts it."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.work = SimpleNamespace(is_completed=lambda: True, wait=lambda deadline: True)

    def rank(self) -> int:
        return 0

    def send(self, buffers, peer, tag):
        if tag == _GREETING:
            return self.work
        assert self.aborted.wait(patient(30))
        raise RuntimeError("aborted")

    recv = send

    def abort(self) -> None:
        self.aborted.set()


def _blocking(form) -> tuple[LaneSpec, Links]:
    """Links without tags whose groups `form` makes."""
    spec = _spec(0, receivers=RECEIVERS[:1])
    links = Links(spec.members[0], "gloo", 90, {pair: (0,) for pair in (spec.members, spec.members[::-1])})
    links._backend, links._form = "nccl", form
    return spec, links


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_call_that_blocks_until_it_is_aborted_is_ended_by_a_close(call):
    group = _Blocks()
    spec, links = _blocking(lambda *_: group)
    links.add(*(spec.members if call == "send" else spec.members[::-1]), None, Deadline(90))
    began = time.monotonic()
    threading.Timer(0.2, links.close, ["epoch 4 was aborted"]).start()
    with pytest.raises(TransportError, match="epoch 4 was aborted"):
        getattr(Lane(spec, 0, links), call)(0, torch.zeros(8, dtype=torch.uint8), 1)
    assert time.monotonic() - began < 1.2 and group.aborted.is_set()


def test_a_group_that_never_forms_is_left_behind_and_dropped_when_it_does():
    came, group = threading.Event(), _Blocks()
    spec, links = _blocking(lambda *_: came.wait(patient(30)) and group)
    began = time.monotonic()
    threading.Timer(0.2, links.close, ["epoch 4 was aborted"]).start()
    with pytest.raises(TransportError, match="epoch 4 was aborted"):
        links.add(*spec.members, None, Deadline(90))
    assert time.monotonic() - began < 1.2
    came.set()
    assert group.aborted.wait(patient(5))
    with pytest.raises(TransportError, match="epoch 4 was aborted"):
        links.add(*spec.members, None, Deadline(90))


def test_links_are_opened_in_rounds():
    """Five sources and seven receivers, and links that take a while: seven or eight are right, one after the other it
    is thirty-one."""
    takes_s, sources, receivers = 0.4, range(5), tuple(f"engine {number} worker 0" for number in range(7))
    turn = rounds((f"trainer rank {source}", receiver) for source in sources for receiver in receivers)
    specs = [LaneSpec(source, "127.0.0.1", free_port(), receivers, "gloo", tuple(
        Link(0, 1 + number, turn[frozenset((f"trainer rank {source}", receiver))])
        for number, receiver in enumerate(receivers))) for source in sources]

    began: list[float] = []

    def form(*_):
        began.append(time.monotonic())
        time.sleep(takes_s)
        return _Forms()

    def open_all(me: str) -> int:
        links = Links(me, "gloo", 60, address="127.0.0.1")
        links._form = form
        lanes = open_lanes([spec for spec in specs if me in spec.members], me, Deadline(60), links)
        return len(lanes)

    members = [f"trainer rank {source}" for source in sources] + list(receivers)
    with ThreadPoolExecutor(len(members)) as pool:
        assert list(pool.map(open_all, members)) == [1] * 5 + [5] * 7
    assert len(began) == 2 * 5 * 7 and max(began) - min(began) < patient(24 * takes_s)


class _Forms:
    """A group over which the first byte has gone."""

    def rank(self) -> int:
        return 0

    def send(self, *_):
        return SimpleNamespace(wait=lambda deadline: True)

    recv = send


def _larger_than_expected(rank: Rank, port: int) -> int:
    lane = _joined(_spec(port, receivers=RECEIVERS[:1]), rank.rank)
    if rank.rank == 0:
        lane.send(0, torch.ones(1000, dtype=torch.uint8), 1).wait(Deadline(20))
        return 0
    buffer = torch.zeros(1000, dtype=torch.uint8)
    lane.receive(0, buffer, 0, 100).wait(Deadline(20))
    return int(buffer.sum())


def test_a_message_larger_than_expected_does_not_end_the_process():
    """gloo would: it throws in a thread of its own. A bucket out of turn must be told, not die of."""
    assert run_ranks(2, _larger_than_expected, free_port(), timeout=40)[1] == 1000


def _shared(rank: Rank, port: int, tagged: bool) -> list[int]:
    """Three streams over one link. The receiver takes them in another order than they are sent in; without tags, each
    end waits for its turn."""
    order = (0, 1, 2, 0, 1)
    spec, deadline = _spec(port, receivers=RECEIVERS[:1]), Deadline(20)
    turns = None if tagged else {(spec.members[0], spec.members[1]): order}
    lane = _joined(spec, rank.rank, turns=turns)
    found: dict[int, list[int]] = {stream: [] for stream in (0, 1, 2)}

    def run(stream: int) -> None:
        for number in range(order.count(stream)):
            buffer = torch.full((1000,), 10 * stream + number, dtype=torch.uint8)
            (lane.receive if rank.rank else lane.send)(stream, buffer.zero_() if rank.rank else buffer,
                                                       1 - rank.rank).wait(deadline)
            found[stream].append(int(buffer.float().mean()))

    threads = [threading.Thread(target=run, args=(stream,)) for stream in (2, 1, 0)]
    for thread in threads:
        thread.start()
        thread.join(0.1)                     # the last in turn comes first
    for thread in threads:
        thread.join(patient(20))
    return [value for values in found.values() for value in values]


@pytest.mark.parametrize("tagged", [True, False])
def test_streams_that_share_a_link_are_told_apart(tagged):
    found = run_ranks(2, _shared, free_port(), tagged, timeout=40)
    assert found == [[0, 1, 10, 11, 20]] * 2


def test_only_bytes_travel():
    lane = Lane(_spec(1), 0, Links("trainer rank 3", "gloo", 1))
    with pytest.raises(ValueError, match="uint8"):
        lane.send(0, torch.zeros(4), 1)
