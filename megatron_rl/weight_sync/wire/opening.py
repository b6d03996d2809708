"""Opening a lane: its members meet at the source's store and connect. Missing members are named, and an abort ends it.

All waits for other members happen at the store, where they can be interrupted. Two members only begin to connect to
each other when both are present.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_rl.stores import tcp_store
from megatron_rl.weight_sync.protocol import CONNECT_S, LaneSpec
from megatron_rl.weight_sync.wire.transport import Deadline, Lane, Links, TransportError, who

ASK_EVERY_S = 1.0
"""Interval at which a waiting member checks whether to give up."""
TRY_EVERY_S = 0.1
"""Interval between attempts to connect while nothing listens."""


def open_lane(spec: LaneSpec, rank: int, deadline: Deadline, links: Links) -> Lane:
    """Join a lane. Returns once every member has joined and the links of this member are up.

    Args:
        rank: this process's number on the lane. Member 0 hosts the store at `spec.address:spec.port`.
        deadline: for all members to arrive and all links to form.
        links: the links that this member has opened so far. Those of the lane are added.

    Raises:
        TransportError: naming the members that did not arrive.
    """
    store = _store(spec, rank, deadline, links)
    _together(spec, rank, dist.PrefixStore("here", store), range(len(spec.members)), deadline, links)
    for sender, receiver in spec.links:
        if rank in (sender, receiver):
            other = receiver if rank == sender else sender
            prefix = f"{spec.backend}/{sender}-{receiver}"
            # Both must be present before either begins to connect, which cannot be interrupted.
            _together(spec, rank, dist.PrefixStore(f"{prefix}/here", store), [rank, other], deadline, links)
            try:
                links.add(spec.members[sender], spec.members[receiver], dist.PrefixStore(prefix, store), deadline)
            except RuntimeError as error:
                raise TransportError(f"{who(spec, rank)}: the {spec.backend} link between {spec.members[sender]} and "
                                     f"{spec.members[receiver]} did not form: {links.closed or error}") from error
    links.keep(store)
    return Lane(spec, rank, links)


def _store(spec: LaneSpec, rank: int, deadline: Deadline, links: Links) -> dist.Store:
    """The source's store, hosted or connected to."""
    try:
        if rank != 0:
            _await_listener(spec, deadline, links)
        store = tcp_store(spec.address, spec.port, host=rank == 0, timeout=deadline.timedelta(CONNECT_S))
    except (OSError, RuntimeError) as error:
        host = "cannot listen" if rank == 0 else f"trainer rank {spec.source} does not answer"
        raise TransportError(f"{who(spec, rank)}: "
                             f"{links.closed or f'{host} at {spec.address}:{spec.port}: {error}'}") from error
    store.set_timeout(deadline.timedelta())
    return store


def _await_listener(spec: LaneSpec, deadline: Deadline, links: Links) -> None:
    """Wait until the store listens, because torch's own connecting cannot be interrupted. Raises OSError."""
    while True:
        try:
            socket.create_connection((spec.address, spec.port), min(ASK_EVERY_S, 0.001 + deadline.remaining())).close()
            return
        except OSError:
            if links.wait_closed(TRY_EVERY_S) or not deadline.remaining():
                raise


def _together(spec: LaneSpec, rank: int, store: dist.Store, members: Sequence[int], deadline: Deadline,
              links: Links) -> None:
    """Register this member, and wait until all `members` are registered."""
    keys = {str(member): spec.members[member] for member in members}
    try:
        store.set(str(rank), "1")
        while not _waited(store, keys, deadline.timedelta(ASK_EVERY_S)):
            if links.closed:
                raise TransportError(f"{who(spec, rank)}: {links.closed}")
            if not deadline.remaining():
                # The host stays a little longer, so that the others can still ask its store for the absent members.
                if rank != 0 or not _waited(store, keys, timedelta(seconds=1)):
                    raise TransportError(f"{who(spec, rank)}: {_absent(spec, store, keys)}")
    except dist.DistError as error:
        raise TransportError(f"{who(spec, rank)}: {_absent(spec, store, keys)}") from error


def _waited(store: dist.Store, keys: Mapping[str, str], patience: timedelta) -> bool:
    """Whether all keys exist before `patience` ends."""
    try:
        store.wait(list(keys), patience)
    except dist.DistStoreError:
        return False
    return True


def _absent(spec: LaneSpec, store: dist.Store, keys: Mapping[str, str]) -> str:
    try:
        names = [name for key, name in keys.items() if not store.check([key])]
    except RuntimeError:
        return f"trainer rank {spec.source} stopped waiting for the members of its lane"
    return f"{', '.join(names)} did not join in time"
