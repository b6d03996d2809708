"""Members of a sync in real processes (`megatron_rl.sync_bench.members`), which tests can make fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.sync_bench.members import Host, Member, Members, together
from tests.ranks import PRELOAD
from tests.weight_sync import sockets, strikes

NO_DEADLINE_S = 1000.0
"""Longer than any test: the deadlines of a sync are the coordinator's and the members' own."""


@contextmanager
def processes_of(kind: str, each: Sequence[tuple]) -> Iterator[list[Member]]:
    """One process for each of these arguments. It makes an object of `kind` ("module:Class") from them at its first
    call."""
    with Members(PRELOAD) as members:
        yield [members.start(f"{kind} {number}", Host("here"), kind, *args, variables={"OMP_NUM_THREADS": "1"})
               for number, args in enumerate(each)]


def start_all(members: Iterable[Member]) -> None:
    """Let the members make their objects at the same time. The deadlines of a sync do not cover this."""
    asyncio.run(together(member.call("ready", timeout_s=NO_DEADLINE_S) for member in members))


class Observed:
    """What tests ask of every member's object."""

    connections = staticmethod(sockets.connections)
    held = staticmethod(sockets.held)
    strike = staticmethod(strikes.strike)
    without_tags = staticmethod(strikes.without_tags)

    def ready(self) -> bool:
        return True
