"""Reading files that other nodes write on a shared file system. Such a file system shows a new name late, and briefly
answers with an error for a file that has just been replaced.

NFS caches the answer "no such file" for up to a minute, and asks its server again when the folder is opened
(close-to-open consistency). A process that waits for a name therefore opens the folder first.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
PASSING = frozenset({errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN})
"""Errors of NFS and Lustre for a file that was replaced, or during the failover of a server."""
RETRY_S = 5.0
PAUSE_S = 0.1


def patiently(action: Callable[[], Result], for_s: float = RETRY_S) -> Result:
    """The result of an action. For `for_s` seconds it is retried after an error that may pass: one of `PASSING`, or a
    text that does not parse."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            return action()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in PASSING or time.monotonic() >= deadline:
                raise
        time.sleep(PAUSE_S)     # a file system does not report its recovery


def read_shared(path: Path, parse: Callable[[str], Any] = json.loads) -> Any | None:
    """The file's text, parsed by `parse`; None while the file does not exist.

    Args:
        parse: raises ValueError for an incomplete text.

    Raises:
        OSError, ValueError: the file could not be read or parsed for `RETRY_S`.
    """
    def read() -> Any | None:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not seen(path):
                return None
            text = path.read_text(encoding="utf-8")
        return parse(text)

    return patiently(read)


def seen(path: Path) -> bool:
    """Whether the name exists on the server now. False while the server cannot tell: the caller asks again. A missing
    folder is looked up in the same way in its parent."""
    try:
        try:
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
        except FileNotFoundError:
            if path.parent == path or not seen(path.parent):
                return False
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno in PASSING:
            return False
        raise
    return True


def names_in(folder: Path, suffix: str = "") -> list[str]:
    """Names in a folder that end in `suffix`, sorted, without files still being written (their names begin with a dot);
    [] while the folder does not exist."""
    try:
        found = patiently(lambda: os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in found if name.endswith(suffix) and not name.startswith("."))


def write_atomically(path: Path, text: str, mode: int = 0o644, *, durable: bool = False) -> None:
    """A reader sees the old file or the whole new one; with `durable` also after a crash of this machine. A write that
    fails leaves nothing."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")

    def write() -> None:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)

    try:
        patiently(write)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
