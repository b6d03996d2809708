"""Lanes: the communicators that weights travel on. `gloo` on CPUs, `nccl` on GPUs, one small interface.

A lane belongs to one source (a trainer rank) and holds the rollout workers that receive from it: rank 0 is the
source, ranks 1, 2, ... its receivers. Everything on it is bytes (`uint8`), so every dtype travels alike. Lanes are
opened in one global order (by source), are kept for the whole attempt, and every wait has a deadline.

Only torch is imported here: trainer processes never load vLLM. `nccl` lanes have not been run yet.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl.stores import tcp_store
from megatron_rl.weight_sync.protocol import LaneSpec


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
    """Point-to-point byte transfers between the source (rank 0) and the receivers."""

    spec: LaneSpec
    rank: int

    def send(self, buffer: torch.Tensor, peer: int) -> Pending: ...

    def receive(self, buffer: torch.Tensor, peer: int) -> Pending: ...

    def close(self) -> None:
        """Leave at once. Transfers of the other members with this one fail now instead of at their deadline."""


def open_lane(spec: LaneSpec, rank: int, timeout_s: float, *, address: str | None = None,
              device: torch.device | None = None) -> Lane:
    """Join a lane; returns once every member has.

    Args:
        rank: this process's rank on the lane; rank 0 hosts the store at `spec.address:spec.port`.
        timeout_s: deadline for all members to arrive, and the lane's default for transfers.
        address: this process's own address, which gloo binds to; None takes gloo's default interface.
        device: the GPU of an `nccl` lane.

    Raises:
        TransportError: naming the members that did not arrive.
    """
    deadline = Deadline(timeout_s)
    store = _meet(spec, rank, deadline)
    group_store = dist.PrefixStore(f"lane{spec.source}/{spec.backend}", store)
    size = len(spec.members)
    try:
        if spec.backend == "gloo":
            group = _gloo_group(group_store, rank, size, timeout_s, address)
        else:
            group = _nccl_group(group_store, rank, size, timeout_s, device)
    except RuntimeError as error:
        raise TransportError(f"{_who(spec, rank)}: the {spec.backend} group of the lane did not form: "
                             f"{error}") from error
    return _GroupLane(spec, rank, group, store)


class _GroupLane:
    """A lane over one of torch's process groups, made directly: no global ranks, no default group."""

    def __init__(self, spec: LaneSpec, rank: int, group: dist.Backend, store: dist.Store) -> None:
        self.spec, self.rank = spec, rank
        self._group, self._store = group, store       # the store must outlive the group

    def send(self, buffer: torch.Tensor, peer: int) -> Pending:
        return _Transfer(self, "send to", peer, buffer)

    def receive(self, buffer: torch.Tensor, peer: int) -> Pending:
        return _Transfer(self, "receive from", peer, buffer)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None


class _Transfer:
    def __init__(self, lane: _GroupLane, verb: str, peer: int, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"lanes carry contiguous uint8 buffers, not {buffer.dtype}")
        self._what = f"{_who(lane.spec, lane.rank)}: {verb} {lane.spec.members[peer]} ({buffer.numel()} bytes)"
        self._buffer = buffer                         # kept alive until the transfer is over
        start = lane._group.send if verb == "send to" else lane._group.recv
        try:
            self._work = start([buffer], peer, 0)
        except RuntimeError as error:
            raise TransportError(f"{self._what} failed: {error}") from error

    def wait(self, deadline: Deadline) -> None:
        try:
            done = self._work.wait(deadline.timedelta())
        except RuntimeError as error:
            raise TransportError(f"{self._what} failed: {error}") from error
        if done is False:
            raise TransportError(f"{self._what} did not finish in time")


def _meet(spec: LaneSpec, rank: int, deadline: Deadline) -> dist.Store:
    """Every member says that it is there and waits for the others, so that the absent can be named."""
    try:
        store = tcp_store(spec.address, spec.port, host=rank == 0, timeout=deadline.timedelta())
    except (OSError, RuntimeError) as error:
        host = "cannot listen" if rank == 0 else f"trainer rank {spec.source} does not answer"
        raise TransportError(f"{_who(spec, rank)}: {host} at {spec.address}:{spec.port}: {error}") from error
    keys = [f"here/{r}" for r in range(len(spec.members))]
    # The host stays a little longer, so that the others can still ask its store who is absent.
    patience = deadline.timedelta() + timedelta(seconds=1 if rank == 0 else 0)
    try:
        store.set(keys[rank], "1")
        store.wait(keys, patience)
    except RuntimeError as error:
        raise TransportError(f"{_who(spec, rank)}: {_absent(spec, store, keys)}") from error
    return store


def _absent(spec: LaneSpec, store: dist.Store, keys: list[str]) -> str:
    try:
        names = [name for key, name in zip(keys, spec.members) if not store.check([key])]
    except RuntimeError:
        return f"trainer rank {spec.source} stopped waiting for the members of its lane"
    return f"{', '.join(names)} did not join in time"


def _gloo_group(store: dist.Store, rank: int, size: int, timeout_s: float, address: str | None) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    create = dist.ProcessGroupGloo.create_device
    options._devices = [create(hostname=address) if address else dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: dist.Store, rank: int, size: int, timeout_s: float, device: torch.device | None
                ) -> dist.Backend:
    if device is None or device.type != "cuda":
        raise ValueError("an nccl lane needs a CUDA device")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)
    return group


def _who(spec: LaneSpec, rank: int) -> str:
    return f"lane {spec.source}, {spec.members[rank]}"
