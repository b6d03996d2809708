"""Lanes: the communicators that carry weights. `gloo` on CPUs, `nccl` on GPUs, with one small interface.

A lane belongs to one source (a trainer rank) and holds the rollout workers that its streams reach, directly or through
other workers. They meet at the source's store. Data travels over links, which are communicators of two members: one
link for everything that a member sends to another, of any stream and lane. A receiver can receive the next bucket while
it forwards the last one, and a death breaks only the dead member's own links. Everything is sent as bytes (`uint8`), so
all dtypes are treated alike. Links are opened in rounds (`opening`) and kept for the whole attempt, and every wait has
a deadline.

gloo distinguishes the streams of a link by a tag. NCCL matches in the order of issue, so both ends issue in the order
that `streams.turns` gives.

Only torch is imported here: trainer processes never load vLLM. `nccl` lanes have not been run between processes yet.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launch import envvars
from megatron_rl.weight_sync.protocol import CONNECT_S, Backend, LaneSpec

POLL_S = 2e-4
_NO_WATCHDOG = timedelta(days=30)
_REPORT_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""What torch reads when it makes a group: an error or a stuck call is logged, and the process lives on."""
_NEVER_SENT, _GREETING = 0, 1
"""Tags of gloo messages: one that is never sent, and the first one of a link."""


class TransportError(RuntimeError):
    """A peer did not arrive, or a transfer failed or missed its deadline. The lane cannot be used again."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Remaining seconds; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def timedelta(self, at_most: float = 1e9) -> timedelta:
        """At least a millisecond, because torch treats a zero timeout as none."""
        return timedelta(seconds=max(0.001, min(self.remaining(), at_most)))


class Links:
    """All links of one member, from all lanes, over torch's process groups of two. The groups are created directly,
    without global ranks or a default group.

    Args:
        me: the member's name.
        timeout_s: the longest wait of a transfer, unless it sets its own.
        turns: names of sender and receiver -> the streams of the messages between them, in the order of both ends.
            None: the backend distinguishes them.
        address: this process's own address, which gloo binds to; None uses gloo's default interface.
        device: the GPU of `nccl` links.
    """

    def __init__(self, me: str, backend: Backend, timeout_s: float,
                 turns: Mapping[tuple[str, str], Sequence[int]] | None = None, *, address: str | None = None,
                 device: torch.device | None = None) -> None:
        self._me, self._backend, self._timeout_s = me, backend, timeout_s
        self._turns, self._device = turns or {}, device
        self._form: Form | None = _gloo_former(address) if backend == "gloo" else _nccl_former(device)
        self._open: dict[tuple[str, str], _Link] = {}
        self._forming: set[Future] = set()
        self._stores: list[dist.Store] = []           # they must outlive the groups
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.closed: str | None = None
        """The reason, once they are closed."""

    def add(self, sender: str, receiver: str, store: dist.Store, deadline: Deadline) -> None:
        """Form a link with the other of the two members, and use it once in both directions. `close` ends the wait.
        Raises RuntimeError."""
        link = _Link(self._formed(store, int(self._me == receiver), deadline), self._backend,
                     self._turns.get((sender, receiver), ()), self._timeout_s)
        with self._lock:
            if self.closed is None:
                self._open[sender, receiver] = link
        if self.closed is not None:
            link.close()
            raise TransportError(self.closed)
        link.greet(self._device, deadline)

    def _formed(self, store: dist.Store, rank: int, deadline: Deadline) -> Group:
        """Form a group in a thread of its own. Nothing interrupts a backend while it connects, so `close` leaves the
        thread behind, which then drops the group."""
        forming: Future[Group] = Future()

        def form(make: Form) -> None:
            try:
                group = make(store, rank, deadline)
            except BaseException as error:
                with contextlib.suppress(InvalidStateError):
                    forming.set_exception(error)
                return
            try:
                forming.set_result(group)
            except InvalidStateError:
                _Link(group, self._backend, (), 0.0).close()

        with self._lock:
            if self.closed is not None or (make := self._form) is None:
                raise TransportError(self.closed or "its lanes are closed")
            self._forming.add(forming)
        threading.Thread(target=form, args=(make,), name="link", daemon=True).start()
        try:
            return forming.result()
        finally:
            with self._lock:
                self._forming.discard(forming)

    def keep(self, store: dist.Store) -> None:
        """Keep a store until the links are closed. If they are closed, drop it at once."""
        with self._lock:
            if self.closed is None:
                self._stores.append(store)

    def link(self, sender: str, receiver: str) -> _Link:
        """The link from sender to receiver. Raises TransportError if it does not exist (any more)."""
        link = self._open.get((sender, receiver))
        if link is None:
            raise TransportError(self.closed or f"{self._me}: there is no link from {sender} to {receiver}")
        return link

    def wait_closed(self, seconds: float) -> bool:
        """Wait at most `seconds` until the links are closed. Returns whether they are."""
        return self._ended.wait(seconds)

    def close(self, reason: str = "") -> None:
        """Fail everything that waits on a link. May be called again and from any thread. All are closed on return."""
        with self._lock:
            if self.closed is None:
                self.closed = reason or "its lanes are closed"
                self._ended.set()
            for forming in self._forming:
                with contextlib.suppress(InvalidStateError):
                    forming.set_exception(TransportError(self.closed))
            while self._open:
                self._open.popitem()[1].close()
            self._stores.clear()
            self._form = None           # gloo's device has a thread and a socket, as long as something refers to it


class Lane:
    """Byte transfers between this member and others of a lane, which `opening.open_lanes` opens. Members are numbered,
    and 0 is the source."""

    def __init__(self, spec: LaneSpec, rank: int, links: Links) -> None:
        self.spec, self.rank, self.links = spec, rank, links

    def send(self, stream: int, buffer: torch.Tensor, peer: int) -> Pending:
        return Pending(self, stream, "send to", peer, buffer)

    def receive(self, stream: int, buffer: torch.Tensor, peer: int, nbytes: int | None = None) -> Pending:
        """Receive `nbytes` (default: all) into the beginning of `buffer`."""
        # gloo ends the process if a message is larger than the buffer, as a bucket out of turn may be. With gloo, the
        # whole buffer is therefore used, and the header reveals the wrong bucket.
        part = buffer if nbytes is None or self.spec.backend == "gloo" else buffer[:nbytes]
        return Pending(self, stream, "receive from", peer, part)

    def close(self, reason: str = "") -> None:
        """Leave at once, from any thread, with all links of this member. Transfers in progress on them fail now, at
        both ends."""
        self.links.close(reason)


class _Link:
    """One communicator, and the stream whose turn it is."""

    def __init__(self, group: Group, backend: Backend, order: Sequence[int], timeout_s: float) -> None:
        self.group, self._backend, self._timeout_s = group, backend, timeout_s
        self._order, self._next = order, 0
        self._moved, self._closed = threading.Condition(), False

    @contextlib.contextmanager
    def turn(self, stream: int) -> Iterator[None]:
        """Hold the turn while a transfer of this stream is issued, and then give it to the next stream. Raises
        TransportError if the turn does not come or the link is closed meanwhile."""
        if not self._order:
            yield
            return
        with self._moved:
            came = self._moved.wait_for(lambda: self._closed or self._order[self._next] == stream, self._timeout_s)
            if self._closed or not came:
                raise TransportError(f"the turn of stream {stream} did not come")
        yield       # without the lock: NCCL may block while it issues, and only `close` ends that
        with self._moved:
            self._next = (self._next + 1) % len(self._order)        # a complete sync has gone through all of them
            self._moved.notify_all()

    def tag(self, stream: int) -> int:
        """One tag per stream, unless the order of issue distinguishes them."""
        return _GREETING + 1 + (0 if self._order else stream)

    def greet(self, device: torch.device | None, deadline: Deadline) -> None:
        """Move a byte both ways, because a backend may connect only at the first message: opening takes that time, and
        no sync does. Raises RuntimeError."""
        byte, rank = torch.zeros(1, dtype=torch.uint8, device=device), self.group.rank()
        for sender in (0, 1):
            move = self.group.send if rank == sender else self.group.recv
            if not self.wait(move([byte], 1 - rank, _GREETING), deadline):
                raise TransportError("the first byte did not arrive in time")

    def wait(self, work: Any, deadline: Deadline) -> bool:
        """Wait until a transfer is over, or the deadline has passed. Raises RuntimeError.

        NCCL is waited for on the host: in its own wait only the CUDA stream waits, without a deadline, together with
        everything launched after it in the same hardware queue.
        """
        if self._backend != "gloo":
            while not work.is_completed():
                if not deadline.remaining():
                    return False
                time.sleep(POLL_S)                      # CUDA's own wait has no deadline
            if self._closed:                            # an aborted transfer counts as completed
                raise TransportError("it was aborted")
        return work.wait(deadline.timedelta()) is not False

    def close(self) -> None:
        """End the link and everything that waits on it."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        if self._backend != "gloo":
            self.group.abort()
        else:
            # gloo's own `abort` wakes no waiter, but it closes a connection at both ends when a wait on it times out.
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                self.group.recv([nothing], 1 - self.group.rank(), _NEVER_SENT).wait(timedelta(milliseconds=1))


class Pending:
    """A transfer in progress."""

    def __init__(self, lane: Lane, stream: int, verb: str, peer: int, buffer: torch.Tensor) -> None:
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
        """Return once the buffer has been sent or filled. Raises TransportError at the deadline."""
        try:
            done = self._link.wait(self._work, deadline)
        except RuntimeError as error:
            raise self._failed(error) from error
        if not done:
            raise TransportError(f"{self._what} did not finish in time")

    def _failed(self, error: RuntimeError) -> TransportError:
        return TransportError(f"{self._what} failed: {self._lane.links.closed or error}")


Group = Any
"""A process group of torch by itself. Torch's annotations of it lack send, recv and broadcast."""
Form = Callable[[dist.Store, int, Deadline], Group]
"""Makes the group of a link from (its store, 0 for the sender and 1 for the receiver, deadline to connect)."""


def _gloo_former(address: str | None) -> Form:
    create = dist.ProcessGroupGloo.create_device
    device = create(hostname=address) if address else dist.ProcessGroupGloo.create_default_device()

    # All links share one device and its thread.
    return lambda store, rank, deadline: gloo_group(store, rank, 2, deadline.timedelta(CONNECT_S), device)


def gloo_group(store: dist.Store, rank: int, size: int, timeout: timedelta, device: Any) -> Group:
    """A communicator over one gloo device."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, timeout
    return gloo(store, rank, size, options)


def _nccl_former(device: torch.device | None) -> Form:
    if device is None or device.type != "cuda":
        raise ValueError("an nccl lane needs a CUDA device")
    return lambda store, rank, deadline: nccl_group(store, rank, 2, device)


def nccl_group(store: dist.Store, rank: int, size: int, device: torch.device) -> Group:
    """A communicator that is connected on return. Torch's watchdog never ends the process because of it: the sync has
    deadlines of its own, and a training rank must outlive a dead engine."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)       # see MOST_LINKS
    options._timeout = _NO_WATCHDOG
    with torch.cuda.device(device):
        with envvars.during(_REPORT_ONLY):      # not while it connects, which may take long
            group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
    return group


def who(spec: LaneSpec, rank: int) -> str:
    """The lane and the member's name, for messages."""
    return f"lane {spec.source}, {spec.members[rank]}"
