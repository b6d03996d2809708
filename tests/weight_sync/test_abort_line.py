"""The abort line over real sockets."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from megatron_rl.weight_sync.protocol import SyncPart
from megatron_rl.weight_sync.wire import abort
from megatron_rl.weight_sync.wire.abort import AbortLine, AbortListener
from tests.patience import patient


@pytest.fixture
def line():
    made = AbortLine("127.0.0.1")
    yield made
    made.close()


class Member:
    def __init__(self, line: AbortLine, since: int = 0) -> None:
        self.reason, self._heard = "", threading.Event()
        self.listener = AbortListener(line.endpoint, line.token, since, self._close)

    def _close(self, reason: str) -> None:
        self.reason = reason
        self._heard.set()

    def hears(self, seconds: float = 10.0) -> str:
        assert self._heard.wait(seconds), "nothing was heard"
        return self.reason


def test_every_member_hears_of_an_abort_and_of_the_end(line):
    first, second = Member(line), Member(line, since=4)
    line.abort(4)
    assert first.hears() == "the coordinator aborted epoch 4"
    assert Member(line, since=3).hears() == "the coordinator aborted epoch 4", "it came just after"
    line.close()
    assert second.hears() == "the coordinator is gone"


def test_members_that_left_are_forgotten(line):
    """Lanes are opened again after every failure: their members' connections must not pile up."""
    def descriptors() -> int:
        return len(os.listdir(Path("/proc/self/fd")))

    before = descriptors()
    for _ in range(40):
        Member(line).listener.close()
    last = Member(line)
    line.abort(1)
    assert last.hears() and descriptors() < before + 8


def test_who_leaves_while_connecting_does_not_deafen_the_line(line):
    for _ in range(20):
        hasty = socket.socket()
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")     # close() resets
        hasty.connect(line.endpoint)
        hasty.close()
    member = Member(line)
    line.abort(2)
    assert member.hears() == "the coordinator aborted epoch 2"


def test_a_member_with_another_token_hears_nothing_and_the_others_do(line):
    with pytest.raises(OSError, match="left before it proved"):
        AbortListener(line.endpoint, "0" * 64, 0, lambda reason: None)
    member = Member(line)
    line.abort(1)
    assert member.hears() == "the coordinator aborted epoch 1"


def test_who_listens_in_the_coordinators_place_aborts_nothing(line):
    """It does not know the token: a member does not take it for the coordinator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def answer() -> None:
            other = listener.accept()[0]
            other.sendall(b"0" * 64 + b"\n" + b"0" * 64 + b"\n" + b"99\n")
            other.recv(1000)

        threading.Thread(target=answer, daemon=True).start()
        closed: list[str] = []
        with pytest.raises(ConnectionRefusedError, match="does not hold this run's token"):
            AbortListener(listener.getsockname(), line.token, 0, closed.append)
        assert closed == []


def test_a_peer_that_says_nothing_keeps_nobody_waiting(line, monkeypatch):
    monkeypatch.setattr(abort, "CONNECT_S", 0.5)
    silent = [socket.create_connection(line.endpoint, timeout=patient(10)) for _ in range(20)]
    assert {len(each.recv(65)) for each in silent} == {65}
    monkeypatch.undo()
    member = Member(line)
    line.abort(1)
    assert member.hears() == "the coordinator aborted epoch 1"
    assert {each.recv(1) for each in silent} == {b""}, "they are put out after their time"
    for each in silent:
        each.close()


def test_a_coordinator_that_says_nothing_is_not_waited_for(line, monkeypatch):
    monkeypatch.setattr(abort, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError):
        AbortListener(listener.getsockname(), line.token, 0, lambda reason: None)


def test_the_token_is_in_no_log(line, caplog):
    """Parts of a sync are printed when a call of a member fails."""
    part = SyncPart((), (), 1.0, 1.0, line=line.endpoint, token=line.token)
    assert line.token not in repr(part) and SyncPart.from_plain(part.plain()) == part
    with pytest.raises(OSError) as caught:
        AbortListener(line.endpoint, line.token[:-1], 0, lambda reason: None)
    assert line.token[:-1] not in f"{caught.value}{caplog.text}"
