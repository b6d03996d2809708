"""The abort line: how members that wait inside a transfer learn that an epoch is over.

A process that is waiting in a transfer cannot take calls, and may notice a remote death only at its own deadline. So
every member keeps a TCP connection to the coordinator and listens to it in a thread. The number of an aborted epoch, or
the end of the connection, closes the member's lanes and wakes everything that waits on them.

Before anything else, both ends prove that they hold the token that the coordinator drew and that its members got with
their part of the sync. Any other process that reaches the port learns nothing, and one that listens there in place of
the coordinator cannot abort anything. The token itself is never sent here.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Time limit for a connection to be made and for both ends to prove their identity."""
_NONCE_BYTES = 32
_LINE_BYTES = 2 * _NONCE_BYTES + 1
"""Length of a nonce and of a proof, in hexadecimal."""


class AbortLine:
    """The coordinator's end. Every connected member receives every abort."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(32)
        """Token for the members. It is in no log, no file and no command line."""
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
        self._members: list[socket.socket] = []
        self._lock = threading.Lock()
        self._last, self._closed = 0, threading.Event()
        threading.Thread(target=self._accept, name="abort line", daemon=True).start()

    @property
    def endpoint(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def abort(self, epoch: int) -> None:
        """Announce that epoch `epoch` and all before it are over. Members that are gone are skipped."""
        with self._lock:
            self._last = epoch
            self._members = [member for member in self._members if _told(member, epoch)]

    def close(self) -> None:
        """Make every member close its lanes."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for member in self._members:
                member.close()
            self._members.clear()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                member = self._listener.accept()[0]
            except OSError:                             # the listener was closed, or a peer left while connecting
                self._closed.wait(0.1)
                continue
            # One thread per connection, so that a silent peer does not keep the others waiting.
            threading.Thread(target=self._admit, args=(member,), name="abort line", daemon=True).start()

    def _admit(self, member: socket.socket) -> None:
        try:
            _prove(member, self.token, first=True)
            member.settimeout(CONNECT_S)                # a member that does not read must not block the others
            _keep_alive(member)
        except OSError as error:
            if not self._closed.is_set():
                log.warning("abort line: a connection was refused: %s", error)
            member.close()
            return
        with self._lock:
            self._members = [each for each in self._members if not _gone(each)]     # lanes are opened repeatedly
            if self._closed.is_set():
                member.close()
            elif _told(member, self._last):             # it may have arrived just after an abort
                self._members.append(member)


class AbortListener:
    """A member's end, for the lanes that it opened after epoch `since`.

    Args:
        token: token of the line.
        closing: called once, from another thread, with the reason.

    Raises:
        OSError: the coordinator does not answer there, or holds another token.
    """

    def __init__(self, endpoint: tuple[str, int], token: str, since: int, closing: Callable[[str], None]) -> None:
        self._since, self._closing = since, closing
        self._socket = socket.create_connection(endpoint, timeout=CONNECT_S)
        try:
            _prove(self._socket, token, first=False)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        self._closed = False
        threading.Thread(target=self._listen, name="abort line", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
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


def _prove(connection: socket.socket, token: str, *, first: bool) -> None:
    """Each end sends a nonce. The member, and then the coordinator (`first` to send) prove that they hold the token.

    Raises:
        OSError: the other end does not hold it, left, or did not finish in time.
    """
    until = time.monotonic() + CONNECT_S
    mine = secrets.token_hex(_NONCE_BYTES).encode()
    connection.sendall(mine + b"\n")
    theirs = _read_line(connection, until)
    nonces = b" ".join((mine, theirs) if first else (theirs, mine))

    def proof(who: bytes) -> bytes:
        return hmac.new(token.encode(), who + b" " + nonces, "sha256").hexdigest().encode()

    for who, ours in ((b"member", not first), (b"coordinator", first)):
        if ours:
            connection.sendall(proof(who) + b"\n")
        elif not hmac.compare_digest(_read_line(connection, until), proof(who)):
            raise ConnectionRefusedError("the other end does not hold this run's token")


def _read_line(connection: socket.socket, until: float) -> bytes:
    line = b""
    while len(line) < _LINE_BYTES:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not prove in time that it holds this run's token")
        connection.settimeout(left)
        received = connection.recv(_LINE_BYTES - len(line))
        if not received:
            raise ConnectionResetError("the other end left before it proved that it holds this run's token")
        line += received
    return line[:-1]


def _told(member: socket.socket, epoch: int) -> bool:
    """Whether the epoch could be sent to the member. If not, its connection is closed."""
    try:
        member.sendall(b"%d\n" % epoch)
        return True
    except OSError:
        member.close()
        return False


def _gone(member: socket.socket) -> bool:
    """Whether the member's end is known to be closed, as members never send anything. This end is then closed too."""
    poll = select.poll()
    poll.register(member, select.POLLIN)
    if not poll.poll(0):
        return False
    member.close()
    return True


def _keep_alive(connection: socket.socket) -> None:
    """Send keep-alive probes, so that the silence of a machine without power is noticed within a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
