"""Lanes: the communicators that weights travel on. `gloo` on CPUs, `nccl` on GPUs, one small interface.

A lane belongs to one source (a trainer rank) and holds the rollout workers that its streams reach, directly or through
other workers. They meet at the source's store. What travels goes over links, communicators of two members: one for
all that a member sends to another, whatever stream and lane it is of. A receiver can take the next bucket in while it
passes the last one on, and who dies breaks nothing but its own links. Everything is bytes (`uint8`), so every dtype
travels alike. Lanes, and the links of a lane, are opened in one global order, are kept for the whole attempt, and every
wait has a deadline.

gloo tells streams that share a link apart by a tag. NCCL matches in the order of issue: there both ends issue in the
order that `streams.turns` gives.

Only torch is imported here: trainer processes never load vLLM. `nccl` lanes have not been run between processes yet.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.weight_sync.protocol import CONNECT_S, Backend, LaneSpec

TAGGED: tuple[Backend, ...] = ("gloo",)
"""Backends that match messages by tag."""
POLL_S = 2e-4
_NEVER_SENT = 0
"""Tag of a gloo message that nobody sends."""


class TransportError(RuntimeError):
    """A peer did not arrive, a transfer failed or ran past its deadline. The lane cannot be used again."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def timedelta(self, at_most: float = 1e9) -> timedelta:
        """At least a millisecond: torch takes a zero timeout for none at all."""
        return timedelta(seconds=max(0.001, min(self.remaining(), at_most)))


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, deadline: Deadline) -> None:
        """Return once the buffer has been sent or filled; raise TransportError at the deadline."""


class Lane(Protocol):
    """Byte transfers between this member and others of a lane. Members are numbered: 0 is the source."""

    spec: LaneSpec
    rank: int

    def send(self, stream: int, buffer: torch.Tensor, peer: int) -> Pending: ...

    def receive(self, stream: int, buffer: torch.Tensor, peer: int, nbytes: int | None = None) -> Pending:
        """Receive `nbytes` (default: all of it) into the beginning of `buffer`."""

    def close(self, reason: str = "") -> None:
        """Leave at once, from whatever thread, with all links of this member. Transfers under way on them fail now, at
        both ends."""


class Links:
    """All links of one member, whatever lane opened them, over torch's process groups of two, made directly: no global
    ranks, no default group.

    Args:
        me: the member's name.
        timeout_s: the longest wait of a transfer, unless it says otherwise.
        turns: names of sender and receiver -> the streams of the messages between the two, in the order of both
            ends. None: the backend tells them apart.
        address: this process's own address, which gloo binds to; None takes gloo's default interface.
        device: the GPU of `nccl` links.
    """

    def __init__(self, me: str, backend: Backend, timeout_s: float,
                 turns: Mapping[tuple[str, str], Sequence[int]] | None = None, *, address: str | None = None,
                 device: torch.device | None = None) -> None:
        self._me, self._backend, self._timeout_s = me, backend, timeout_s
        self._turns = turns or {}
        self._form = _gloo_former(address) if backend == "gloo" else _nccl_former(timeout_s, device)
        self._open: dict[tuple[str, str], _Link] = {}
        self._stores: list[dist.Store] = []           # they must outlive the groups
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.closed: str | None = None
        """Why, once they are."""

    def add(self, sender: str, receiver: str, store: dist.Store, deadline: Deadline) -> None:
        """Form a link with the other of the two. Raises RuntimeError."""
        group = self._form(store, int(self._me == receiver), deadline)
        link = _Link(group, self._backend, self._turns.get((sender, receiver), ()), self._timeout_s)
        with self._lock:
            if self.closed is None:
                self._open[sender, receiver] = link
                return
        link.close()
        raise TransportError(self.closed)

    def keep(self, store: dist.Store) -> None:
        """Until the links are closed; at once, if they are."""
        with self._lock:
            if self.closed is None:
                self._stores.append(store)

    def link(self, sender: str, receiver: str) -> _Link:
        """Raises TransportError: there is none, or not any more."""
        link = self._open.get((sender, receiver))
        if link is None:
            raise TransportError(self.closed or f"{self._me}: there is no link from {sender} to {receiver}")
        return link

    def wait_closed(self, seconds: float) -> bool:
        """Whether they are closed, at the latest after `seconds`."""
        return self._ended.wait(seconds)

    def close(self, reason: str = "") -> None:
        """Fail whatever waits on a link. May be called again, and from any thread: all are closed when it returns."""
        with self._lock:
            if self.closed is None:
                self.closed = reason or "its lanes are closed"
                self._ended.set()
            while self._open:
                self._open.popitem()[1].close()
            self._stores.clear()


class LinkedLane:
    """A lane that was opened (`opening.open_lane`)."""

    def __init__(self, spec: LaneSpec, rank: int, links: Links) -> None:
        self.spec, self.rank, self.links = spec, rank, links

    def send(self, stream: int, buffer: torch.Tensor, peer: int) -> Pending:
        return _Transfer(self, stream, "send to", peer, buffer)

    def receive(self, stream: int, buffer: torch.Tensor, peer: int, nbytes: int | None = None) -> Pending:
        # gloo ends the process when a message is larger than the buffer, as a bucket that is out of turn may be:
        # there the whole buffer takes it in, and its header tells.
        part = buffer if nbytes is None or self.spec.backend == "gloo" else buffer[:nbytes]
        return _Transfer(self, stream, "receive from", peer, part)

    def close(self, reason: str = "") -> None:
        self.links.close(reason)


class _Link:
    """One communicator, and whose turn it is on it."""

    def __init__(self, group: Group, backend: Backend, order: Sequence[int], timeout_s: float) -> None:
        self.group, self._backend, self._timeout_s = group, backend, timeout_s
        self._order, self._next = order, 0
        self._moved, self._closed = threading.Condition(), False

    @contextlib.contextmanager
    def turn(self, stream: int) -> Iterator[None]:
        """Hold it while a transfer of this stream is issued; it is then the turn of the next one. Raises TransportError
        if it does not come, or the link is closed meanwhile."""
        if not self._order:
            yield
            return
        with self._moved:
            came = self._moved.wait_for(lambda: self._closed or self._order[self._next] == stream, self._timeout_s)
            if self._closed or not came:
                raise TransportError(f"the turn of stream {stream} did not come")
            yield
            self._next = (self._next + 1) % len(self._order)        # a sync that ends has gone through all of them
            self._moved.notify_all()

    def tag(self, stream: int) -> int:
        """One for each stream, unless the order of issue tells them apart."""
        return _NEVER_SENT + 1 + (0 if self._order else stream)

    def close(self) -> None:
        """End it with whatever waits on it."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        if self._backend != "gloo":
            self.group.abort()
        else:
            # gloo's own `abort` wakes nobody: it closes a connection, at both ends, when a wait on it times out.
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self.group.recv([nothing], 1 - self.group.rank(), _NEVER_SENT).wait(timedelta(milliseconds=1))


class _Transfer:
    def __init__(self, lane: LinkedLane, stream: int, verb: str, peer: int, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"lanes carry contiguous uint8 buffers, not {buffer.dtype}")
        me, other = lane.spec.members[lane.rank], lane.spec.members[peer]
        self._what = f"{who(lane.spec, lane.rank)}: {verb} {other} ({buffer.numel()} bytes)"
        self._lane, self._buffer = lane, buffer       # kept alive until the transfer is over
        sends = verb == "send to"
        self._link = lane.links.link(*((me, other) if sends else (other, me)))
        group = self._link.group
        start = group.send if sends else group.recv
        try:
            with self._link.turn(stream):
                self._work = start([buffer], 1 - group.rank(), self._link.tag(stream))
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, deadline: Deadline) -> None:
        try:
            done = self._done_by(deadline) and self._work.wait(deadline.timedelta()) is not False
        except RuntimeError as error:
            raise self._failed(error) from error
        if not done:
            raise TransportError(f"{self._what} did not finish in time")

    def _done_by(self, deadline: Deadline) -> bool:
        """In NCCL's own wait only the CUDA stream waits, without a deadline, and all that is launched after it in the
        same hardware queue: so the host does it."""
        if self._lane.spec.backend == "gloo":
            return True
        while not self._work.is_completed():
            if not deadline.remaining():
                return False
            time.sleep(POLL_S)                          # CUDA's own wait has no deadline
        if self._lane.links.closed is not None:         # an aborted transfer counts as completed
            raise TransportError(self._lane.links.closed)
        return True

    def _failed(self, error: RuntimeError) -> TransportError:
        return TransportError(f"{self._what} failed: {self._lane.links.closed or error}")


Group = Any
"""A process group of torch by itself. Its annotations in torch have no send, recv or broadcast."""
Form = Callable[[dist.Store, int, Deadline], Group]
"""Makes the group of a link: (its store, 0 for the sender and 1 for the receiver, for both to connect)."""


def _gloo_former(address: str | None) -> Form:
    create = dist.ProcessGroupGloo.create_device
    device = create(hostname=address) if address else dist.ProcessGroupGloo.create_default_device()

    # One device, and its thread, for all links.
    return lambda store, rank, deadline: gloo_group(store, rank, 2, deadline.timedelta(CONNECT_S), device)


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta, device: Any) -> Group:
    """A communicator over one gloo device."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, timeout
    return gloo(store, rank, size, options)


def _nccl_former(timeout_s: float, device: torch.device | None) -> Form:
    if device is None or device.type != "cuda":
        raise ValueError("an nccl lane needs a CUDA device")
    return lambda store, rank, deadline: nccl_group(store, rank, 2, timeout_s, device)


def nccl_group(store: dist.Store, rank: int, size: int, timeout_s: float, device: torch.device) -> Group:
    """A communicator that is connected when this returns."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
    return group


def who(spec: LaneSpec, rank: int) -> str:
    """For messages."""
    return f"lane {spec.source}, {spec.members[rank]}"
