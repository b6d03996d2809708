"""The abort line over real sockets."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from megatron_rl.weight_sync.abort import AbortLine, AbortListener


@pytest.fixture
def line():
    made = AbortLine("127.0.0.1")
    yield made
    made.close()


class Member:
    def __init__(self, line: AbortLine, since: int = 0) -> None:
        self.reason, self._heard = "", threading.Event()
        self.listener = AbortListener(line.endpoint, since, self._close)

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
