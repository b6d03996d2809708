"""torch's TCPStore on the job's own address. By itself it listens on every interface of the machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

BACKLOG = 2048


def tcp_store(address: str, port: int, *, host: bool, timeout: timedelta) -> dist.TCPStore:
    """A store at `address:port`: hosted here, listening on that address alone, or reached as a client.

    Raises:
        OSError: the host cannot listen there (the port is taken, the address is not this machine's).
        dist.DistStoreError: no host answers within `timeout`.
    """
    descriptor = _listen(address, port) if host else None
    return dist.TCPStore(address, port, is_master=host, wait_for_workers=False, timeout=timeout,
                         master_listen_fd=descriptor)


def meet(store: dist.Store, member: int, members: Sequence[str], timeout: timedelta) -> None:
    """Say that this member is here and wait for the others, so that the absent can be named.

    Raises:
        TimeoutError: naming the members that did not come within `timeout`.
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
    """A listening socket's descriptor; the store owns it from here on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        return listener.detach()
