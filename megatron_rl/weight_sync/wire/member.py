"""What a member of a sync keeps between two syncs: its streams, its lanes and its end of the abort line."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_rl.weight_sync.plan.streams import Stream, route_fingerprint, turns
from megatron_rl.weight_sync.protocol import TAGGED, Held, SyncPart, member_name
from megatron_rl.weight_sync.wire.abort import AbortListener
from megatron_rl.weight_sync.wire.opening import open_lanes
from megatron_rl.weight_sync.wire.transport import Deadline, Lane, Links, TransportError


class Membership:
    """Opened by `sync_open`, and closed by a failure, an abort or the end of the run.

    Args:
        name: the member's name on its lanes.
        mine: whether this member is on a stream.
        address: this process's address in the job; None uses gloo's default interface.

    Raises:
        TransportError: a lane did not form, or the coordinator does not answer; the message names missing members.
    """

    def __init__(self, name: str, part: SyncPart, mine: Callable[[Stream], bool], *, address: str | None,
                 device: torch.device) -> None:
        self.name, self.timeout_s = name, part.timeout_s
        self.streams = tuple(stream for stream in part.streams if mine(stream))
        self._lanes: dict[int, Lane] = {}
        self._line: AbortListener | None = None
        backend = part.lanes[0].backend if part.lanes else "gloo"
        order = None if backend in TAGGED else {(member_name(sender), member_name(receiver)): streams
                                                for (sender, receiver), streams in turns(self.streams).items()}
        self._links = Links(name, backend, part.timeout_s, order, address=address, device=device)
        deadline = Deadline(part.open_timeout_s)
        try:
            if part.line is not None:
                self._line = AbortListener(part.line, part.token, part.epoch, self.close)
            self._lanes = open_lanes([spec for spec in part.lanes if name in spec.members], name, deadline, self._links)
        except OSError as error:
            self.close()
            raise TransportError(f"{name}: the coordinator does not answer at {part.line}: {error}") from error
        except BaseException:                        # only this object can close what it has opened
            self.close()
            raise
        self.held = Held(name, route_fingerprint(part.streams),
                         {stream.number: stream.fingerprint() for stream in self.streams})

    @property
    def closed(self) -> str | None:
        """Why its lanes are closed; None while they are open."""
        return self._links.closed

    def lane(self, stream: Stream) -> Lane:
        """The lane of a stream. Raises TransportError once it is closed."""
        if self.closed is not None:
            raise TransportError(self.closed)
        return self._lanes[stream.rank]

    def close(self, reason: str = "") -> None:
        """Leave all lanes; everything that waits on them fails. It may be called again and from any thread. When a call
        has returned, the lanes are closed and their ports are free."""
        self._links.close(reason)
        if self._line is not None:
            self._line.close()
