"""Opening lanes: the members of each meet at its source's store and connect. Missing members are named, and an abort
ends it.

All waits for other members happen at the stores, where they can be interrupted. A member first joins all its lanes, and
then opens its links round by round: a member has at most one in a round, so nobody waits for a chain of others. Two
members only begin to connect to each other when both are present.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatron_rl.stores import tcp_store
from megatron_rl.weight_sync.protocol import CONNECT_S, LaneSpec
from megatron_rl.weight_sync.wire.transport import Deadline, Lane, Links, TransportError, who

CONNECT_WAIT_S = 1.0
"""Time limit of one attempt to reach a listener."""
FIRST_LOOK_S, LOOK_EVERY_S = 0.005, 0.2
"""Intervals at which a waiting member looks into a store: the first, and the longest. A wait inside torch's store could
not be interrupted, and logs a line whenever its time is over."""
STAY_S = 1.0
"""A source keeps its store this much longer, so that the other members can ask it which members are absent."""


def open_lanes(specs: Sequence[LaneSpec], me: str, deadline: Deadline, links: Links) -> dict[int, Lane]:
    """Join lanes: the source of each -> the lane. Returns once every member has joined and this member's links are up.

    Args:
        specs: the lanes that this member is on, in the order that all members share.
        me: this member's name. The source of a lane hosts its store at `spec.address:spec.port`.
        deadline: for all members to arrive and all links to form.
        links: the links that this member has opened so far. Those of the lanes are added.

    Raises:
        TransportError: naming the members that did not arrive.
    """
    joined = [_Joined(spec, spec.members.index(me), deadline, links) for spec in specs]
    for lane in joined:
        lane.arrive()
    for lane in joined:
        lane.meet(range(len(lane.spec.members)))
    mine = [(link.round, number, link.sender, link.receiver) for number, lane in enumerate(joined)
            for link in lane.spec.links if lane.rank in (link.sender, link.receiver)]
    for _, number, sender, receiver in sorted(mine, key=lambda link: link[:2]):
        joined[number].connect(sender, receiver)
    return {lane.spec.source: Lane(lane.spec, lane.rank, links) for lane in joined}


class _Joined:
    """A lane that this member, number `rank`, is joining."""

    def __init__(self, spec: LaneSpec, rank: int, deadline: Deadline, links: Links) -> None:
        self.spec, self.rank, self._deadline, self._links = spec, rank, deadline, links
        self._store = self._reach()
        links.keep(self._store)

    def arrive(self, prefix: str = "here") -> None:
        """Register this member."""
        dist.PrefixStore(prefix, self._store).set(str(self.rank), "1")

    def meet(self, members: Sequence[int], prefix: str = "here") -> None:
        """Wait until all `members` are registered."""
        spec, store = self.spec, dist.PrefixStore(prefix, self._store)
        keys = {str(member): spec.members[member] for member in members}
        try:
            if not self._present(store, keys, self._deadline):
                # The host stays a little longer, so that the others can still ask its store for the absent members.
                if self.rank != 0 or not self._present(store, keys, Deadline(STAY_S)):
                    raise TransportError(f"{who(spec, self.rank)}: {_absent(spec, store, keys)}")
        except dist.DistError as error:
            raise TransportError(f"{who(spec, self.rank)}: {_absent(spec, store, keys)}") from error

    def connect(self, sender: int, receiver: int) -> None:
        """Form the link between two members, of which this is one."""
        spec = self.spec
        prefix = f"{spec.backend}/{sender}-{receiver}"
        # Both must be present before either begins to connect, which cannot be interrupted.
        self.arrive(f"{prefix}/here")
        self.meet([sender, receiver], f"{prefix}/here")
        try:
            self._links.add(spec.members[sender], spec.members[receiver], dist.PrefixStore(prefix, self._store),
                            self._deadline)
        except RuntimeError as error:
            raise TransportError(f"{who(spec, self.rank)}: the {spec.backend} link between {spec.members[sender]} and "
                                 f"{spec.members[receiver]} did not form: {self._links.closed or error}") from error

    def _reach(self) -> dist.Store:
        """The source's store, hosted or connected to."""
        spec = self.spec
        try:
            if self.rank != 0:
                self._await_listener()
            store = tcp_store(spec.address, spec.port, host=self.rank == 0, timeout=self._deadline.timedelta(CONNECT_S))
        except (OSError, RuntimeError) as error:
            host = "cannot listen" if self.rank == 0 else f"trainer rank {spec.source} does not answer"
            raise TransportError(f"{who(spec, self.rank)}: "
                                 f"{self._links.closed or f'{host} at {spec.address}:{spec.port}: {error}'}") from error
        store.set_timeout(self._deadline.timedelta())
        return store

    def _await_listener(self) -> None:
        """Wait until the store listens, because torch's own connecting cannot be interrupted. Raises OSError."""
        pause = FIRST_LOOK_S
        while True:
            try:
                socket.create_connection((self.spec.address, self.spec.port),
                                         min(CONNECT_WAIT_S, 0.001 + self._deadline.remaining())).close()
                return
            except OSError:
                if self._links.wait_closed(pause) or not self._deadline.remaining():
                    raise
                pause = min(2 * pause, LOOK_EVERY_S)

    def _present(self, store: dist.Store, keys: Mapping[str, str], deadline: Deadline) -> bool:
        """Whether all keys exist before the deadline. Raises TransportError if the links are closed meanwhile."""
        pause = FIRST_LOOK_S
        while not store.check(list(keys)):
            if not deadline.remaining():
                return False
            if self._links.wait_closed(pause):
                raise TransportError(f"{who(self.spec, self.rank)}: {self._links.closed}")
            pause = min(2 * pause, LOOK_EVERY_S)
        return True


def _absent(spec: LaneSpec, store: dist.Store, keys: Mapping[str, str]) -> str:
    try:
        names = [name for key, name in keys.items() if not store.check([key])]
    except RuntimeError:
        return f"trainer rank {spec.source} stopped waiting for the members of its lane"
    return f"{', '.join(names)} did not join in time"
