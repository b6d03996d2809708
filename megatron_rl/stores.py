"""torch's TCPStore on the job's own address. By default it listens on every interface of the machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

BACKLOG = 2048


def tcp_store(address: str, port: int, *, host: bool, timeout: timedelta) -> dist.TCPStore:
    """Host a store that listens on `address:port` only, or connect to it as a client.

    Raises:
        OSError: the host cannot listen there (the port is taken, or the address is not this machine's).
        dist.DistStoreError: no host answers within `timeout`.
    """
    descriptor = _listen(address, port) if host else None
    return dist.TCPStore(address, port, is_master=host, wait_for_workers=False, timeout=timeout,
                         master_listen_fd=descriptor)


def meet(store: dist.Store, member: int, members: Sequence[str], timeout: timedelta) -> None:
    """Register this member and wait for the others, so that an error can name the absent members.

    Raises:
        TimeoutError: a member did not arrive within `timeout`. The message names it.
    """
    store.set(f"here/{member}", "1")
    keys = [f"here/{index}" for index in range(len(members))]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        absent = [name for key, name in zip(keys, members, strict=True) if not store.check([key])]
        raise TimeoutError(f"{members[member]}: {', '.join(absent)} did not come within "
                           f"{timeout.total_seconds():.0f} s") from error


def _listen(address: str, port: int) -> int:
    """Return the descriptor of a listening socket. The store then owns it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        return listener.detach()
