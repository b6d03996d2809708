"""The abort line: how members learn that an epoch is over while they wait inside a transfer.

A transfer blocks its process, vLLM's workers take no call meanwhile, and a death far away is seen by some neighbours at
once and by others at their deadline. So every member keeps a TCP connection to the coordinator and listens to it in a
thread: the number of an epoch that is aborted, or the end of the connection, closes the member's lanes and wakes
whatever waits on them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

CONNECT_S = 10.0


class AbortLine:
    """The coordinator's end: everybody who connects hears of every abort."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
        self._members: list[socket.socket] = []
        self._lock = threading.Lock()
        self._last = 0
        threading.Thread(target=self._accept, name="abort line", daemon=True).start()

    @property
    def endpoint(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def abort(self, epoch: int) -> None:
        """Epoch `epoch` and all before it are over. Members that are gone are skipped."""
        with self._lock:
            self._last = epoch
            for member in self._members:
                with contextlib.suppress(OSError):
                    member.sendall(b"%d\n" % epoch)

    def close(self) -> None:
        """Every member closes its lanes."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for member in self._members:
                member.close()
            self._members.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):              # the listener was closed
            while True:
                member = self._listener.accept()[0]
                member.settimeout(CONNECT_S)            # one that does not read must not hold up the others
                with self._lock, contextlib.suppress(OSError):
                    self._members.append(member)
                    member.sendall(b"%d\n" % self._last)       # it may have come just after an abort


class AbortListener:
    """A member's end, for the lanes that it opened after epoch `since`.

    Args:
        closing: called once, from another thread, with the reason.

    Raises:
        OSError: the coordinator does not answer there.
    """

    def __init__(self, endpoint: tuple[str, int], since: int, closing: Callable[[str], None]) -> None:
        self._since, self._closing = since, closing
        self._socket = socket.create_connection(endpoint, timeout=CONNECT_S)
        self._socket.settimeout(None)
        self._closed = False
        threading.Thread(target=self._listen, name="abort line", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        reason = "the coordinator is gone"
        with contextlib.suppress(OSError, ValueError):
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    if int(line) > self._since:
                        reason = f"the coordinator aborted epoch {int(line)}"
                        break
        if not self._closed:
            self._closing(reason)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
