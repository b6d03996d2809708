"""An exclusive file lock with a deadline. It reports who holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.errors import UserError


@contextmanager
def held(path: Path, within_s: float) -> Iterator[None]:
    """Hold the lock of `path`, a file that serves only as a lock. Its text names the holder.

    Raises:
        UserError: the lock was not free within `within_s`; the message names the holder if it is known.
        OSError: the file cannot be created, or its file system has no locks.
    """
    taking = _Taking(path)
    taking.start()
    file = taking.result(within_s)
    if file is None:
        holder = _text(path)
        raise UserError(f"the lock was not free within {within_s:.0f} s: " + (f"{holder} holds it" if holder else
                        "its holder is not known"), where=str(path.absolute()),
                        fix="end that process if it hangs; if it does not exist, the lock service of the file system "
                            "hangs (NFS: rpc.statd, lockd)")
    try:
        with suppress(OSError):     # the text is for people only
            os.ftruncate(file, 0)
            os.pwrite(file, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(file, 0)
        os.close(file)


class _Taking(threading.Thread):
    """Waits for the lock, in a thread of its own: with a hung lock service the call never returns, not even with
    LOCK_NB, and only the end of the process stops it."""

    def __init__(self, path: Path) -> None:
        super().__init__(name=f"lock {path.name}", daemon=True)
        self._path, self._given_up = path, False
        self._file: int | None = None
        self._error: OSError | None = None
        self._guard = threading.Lock()

    def run(self) -> None:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)   # NFS locks only files open for writing
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            self._error = error
            return
        with self._guard:
            self._file = file
            if self._given_up:
                os.close(file)

    def result(self, within_s: float) -> int | None:
        """The locked file, or None past the deadline. A lock obtained later is released at once."""
        self.join(within_s)
        with self._guard:
            self._given_up = self._file is None
        if self._error is not None:
            raise self._error
        return self._file


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
