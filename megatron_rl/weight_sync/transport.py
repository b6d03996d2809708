"""Lanes: the communicators that weights travel on. `gloo` on CPUs, `nccl` on GPUs, one small interface.

A lane belongs to one source (a trainer rank) and holds the rollout workers that its streams reach, directly or through
other workers. It consists of links, communicators of two members, one for each hop of each stream: a receiver can
take the next bucket in while it passes the last one on, and who dies breaks nothing but its own links. Everything is
bytes (`uint8`), so every dtype travels alike. Lanes, and the links of a lane, are opened in one global order, are kept
for the whole attempt, and every wait has a deadline.

Only torch is imported here: trainer processes never load vLLM. `nccl` lanes have not been run between processes yet.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl.stores import tcp_store
from megatron_rl.weight_sync.protocol import LaneSpec, Link

_NEVER_SENT = 1
"""Tag of a gloo message that nobody sends; buckets have tag 0."""


class TransportError(RuntimeError):
    """A peer did not arrive, a transfer failed or ran past its deadline. The lane cannot be used again."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def timedelta(self) -> timedelta:
        """At least a millisecond: torch takes a zero timeout for none at all."""
        return timedelta(seconds=max(0.001, self.remaining()))


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, deadline: Deadline) -> None:
        """Return once the buffer has been sent or filled; raise TransportError at the deadline."""


class Lane(Protocol):
    """Byte transfers over the links of this member. Members are numbered: 0 is the source."""

    spec: LaneSpec
    rank: int

    def send(self, stream: int, buffer: torch.Tensor, peer: int) -> Pending: ...

    def receive(self, stream: int, buffer: torch.Tensor, peer: int, nbytes: int | None = None) -> Pending:
        """Receive `nbytes` (default: all of it) into the beginning of `buffer`."""

    def close(self, reason: str = "") -> None:
        """Leave at once, from whatever thread. Transfers under way on this lane fail now, at both ends."""


def open_lane(spec: LaneSpec, rank: int, timeout_s: float, *, address: str | None = None,
              device: torch.device | None = None, stopped: Callable[[], str | None] = lambda: None) -> Lane:
    """Join a lane; returns once every member has, and the links of this member are up.

    Args:
        rank: this process's number on the lane; 0 hosts the store at `spec.address:spec.port`.
        timeout_s: deadline for all members to arrive, and the links' default for transfers.
        address: this process's own address, which gloo binds to; None takes gloo's default interface.
        device: the GPU of an `nccl` lane.
        stopped: asked every second whether to wait no longer, and why.

    Raises:
        TransportError: naming the members that did not arrive.
    """
    store = _meet(spec, rank, Deadline(timeout_s), stopped)
    lane = _LinkedLane(spec, rank, store)
    form = _gloo_links(timeout_s, address) if spec.backend == "gloo" else _nccl_links(timeout_s, device)
    try:
        for link in spec.links:
            if rank in link[1:]:
                prefix = f"{spec.backend}/{link.stream}/{link.sender}-{link.receiver}"
                lane.add(link, form(dist.PrefixStore(prefix, store), int(rank == link.receiver)))
    except RuntimeError as error:
        lane.close()
        raise TransportError(f"{_who(spec, rank)}: the {spec.backend} link between {spec.members[link.sender]} and "
                             f"{spec.members[link.receiver]} did not form: {error}") from error
    return lane


class _LinkedLane:
    """A lane over torch's process groups of two, made directly: no global ranks, no default group."""

    def __init__(self, spec: LaneSpec, rank: int, store: dist.Store) -> None:
        self.spec, self.rank = spec, rank
        self._store = store                           # it must outlive the groups
        self._links: dict[tuple[int, int], dist.Backend] = {}
        self.closed: str | None = None
        """Why, once it is."""

    def add(self, link: Link, group: dist.Backend) -> None:
        self._links[link.stream, link.receiver if self.rank == link.sender else link.sender] = group

    def send(self, stream: int, buffer: torch.Tensor, peer: int) -> Pending:
        return _Transfer(self, stream, "send to", peer, buffer)

    def receive(self, stream: int, buffer: torch.Tensor, peer: int, nbytes: int | None = None) -> Pending:
        # gloo ends the process when a message is larger than the buffer, as a bucket that is out of turn may be:
        # there the whole buffer takes it in, and its header tells.
        part = buffer if nbytes is None or self.spec.backend == "gloo" else buffer[:nbytes]
        return _Transfer(self, stream, "receive from", peer, part)

    def link(self, stream: int, peer: int) -> dist.Backend:
        group = self._links.get((stream, peer))
        if group is None:
            raise TransportError(self.closed or f"{_who(self.spec, self.rank)}: stream {stream} has no link to "
                                                f"{self.spec.members[peer]}")
        return group

    def close(self, reason: str = "") -> None:
        if self.closed is None:
            self.closed = reason or "its lanes are closed"
        while self._links:
            _interrupt(self._links.popitem()[1], self.spec.backend)
        self._store = None


class _Transfer:
    def __init__(self, lane: _LinkedLane, stream: int, verb: str, peer: int, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"lanes carry contiguous uint8 buffers, not {buffer.dtype}")
        self._what = f"{_who(lane.spec, lane.rank)}: {verb} {lane.spec.members[peer]} ({buffer.numel()} bytes)"
        self._lane, self._buffer = lane, buffer       # kept alive until the transfer is over
        self._group = lane.link(stream, peer)
        start = self._group.send if verb == "send to" else self._group.recv
        other = 1 - self._group.rank()
        try:
            self._work = start([buffer], other, 0)
        except RuntimeError as error:
            raise self._failed(error) from error

    def wait(self, deadline: Deadline) -> None:
        try:
            done = self._work.wait(deadline.timedelta())
        except RuntimeError as error:
            raise self._failed(error) from error
        if done is False:
            raise TransportError(f"{self._what} did not finish in time")

    def _failed(self, error: RuntimeError) -> TransportError:
        return TransportError(f"{self._what} failed: {self._lane.closed or error}")


def _interrupt(group: dist.Backend, backend: str) -> None:
    """End a link with whatever waits on it. gloo's own `abort` wakes nobody: it closes a connection, at both ends, when
    a wait on it times out."""
    if backend != "gloo":
        group.abort()
        return
    with contextlib.suppress(RuntimeError):
        nothing = torch.empty(1, dtype=torch.uint8)
        group.recv([nothing], 1 - group.rank(), _NEVER_SENT).wait(timedelta(milliseconds=1))


def _meet(spec: LaneSpec, rank: int, deadline: Deadline, stopped: Callable[[], str | None]) -> dist.Store:
    """Every member says that it is there and waits for the others, so that the absent can be named."""
    try:
        store = tcp_store(spec.address, spec.port, host=rank == 0, timeout=deadline.timedelta())
    except (OSError, RuntimeError) as error:
        host = "cannot listen" if rank == 0 else f"trainer rank {spec.source} does not answer"
        raise TransportError(f"{_who(spec, rank)}: {host} at {spec.address}:{spec.port}: {error}") from error
    keys = [f"here/{r}" for r in range(len(spec.members))]
    try:
        store.set(keys[rank], "1")
        while not _waited(store, keys, deadline.timedelta()):
            if stopped():
                raise TransportError(f"{_who(spec, rank)}: {stopped()}")
            if not deadline.remaining():
                # The host stays a little longer, so that the others can still ask its store who is absent.
                if rank != 0 or not _waited(store, keys, timedelta(seconds=1)):
                    raise TransportError(f"{_who(spec, rank)}: {_absent(spec, store, keys)}")
    except dist.DistError as error:
        raise TransportError(f"{_who(spec, rank)}: {_absent(spec, store, keys)}") from error
    return store


def _waited(store: dist.Store, keys: list[str], patience: timedelta) -> bool:
    """Whether all keys are there within a second, or less if patience ends before."""
    try:
        store.wait(keys, min(patience, timedelta(seconds=1)))
    except dist.DistStoreError:
        return False
    return True


def _absent(spec: LaneSpec, store: dist.Store, keys: list[str]) -> str:
    try:
        names = [name for key, name in zip(keys, spec.members) if not store.check([key])]
    except RuntimeError:
        return f"trainer rank {spec.source} stopped waiting for the members of its lane"
    return f"{', '.join(names)} did not join in time"


Form = Callable[[dist.Store, int], dist.Backend]
"""Makes the group of a link: (its store, 0 for the sender and 1 for the receiver)."""


def _gloo_links(timeout_s: float, address: str | None) -> Form:
    create = dist.ProcessGroupGloo.create_device
    device = create(hostname=address) if address else dist.ProcessGroupGloo.create_default_device()

    def form(store: dist.Store, rank: int) -> dist.Backend:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads = [device], 1            # one device, and its thread, for all links
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(store, rank, 2, options)

    return form


def _nccl_links(timeout_s: float, device: torch.device | None) -> Form:
    if device is None or device.type != "cuda":
        raise ValueError("an nccl lane needs a CUDA device")
    return lambda store, rank: nccl_group(store, rank, 2, timeout_s, device)


def nccl_group(store: dist.Store, rank: int, size: int, timeout_s: float, device: torch.device) -> dist.Backend:
    """A communicator that is connected when this returns."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
    return group


def _who(spec: LaneSpec, rank: int) -> str:
    return f"lane {spec.source}, {spec.members[rank]}"
