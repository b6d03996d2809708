"""Reading files that other nodes write, on a shared file system: it shows a new name late, and for a moment answers
with an error about a file that has just been replaced.

NFS keeps the answer "no such file" for up to a minute, and asks its server again when the folder is opened
(close-to-open consistency): whoever waits for a name opens the folder first.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
PASSING = frozenset({errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ESHUTDOWN, errno.ENOTCONN})
"""What NFS and Lustre say of a file that was replaced, or while a server is taken over by another."""
RETRY_S = 5.0
PAUSE_S = 0.1


def patiently(action: Callable[[], Result], for_s: float = RETRY_S) -> Result:
    """The result of an action that is tried again, for some seconds, after an error that may pass: one of `PASSING`,
    or a text that does not parse."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            return action()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in PASSING or time.monotonic() >= deadline:
                raise
        time.sleep(PAUSE_S)     # a file system tells nobody when it has recovered


def read_shared(path: Path, parse: Callable[[str], Any] = json.loads) -> Any | None:
    """What `parse` makes of the file's text; None while there is no such file.

    Args:
        parse: raises ValueError for a text that is not whole.

    Raises:
        OSError, ValueError: the file could not be read, or parsed, for `RETRY_S`.
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
    """Whether the name is there, as its server has it now. False where that cannot be said at the moment: who waits
    asks again. A folder that is not there is asked for in the same way, in the one above."""
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
    """Names of a folder that end in `suffix`, sorted, without those of files that are still being written (they begin
    with a dot); [] while there is no such folder."""
    try:
        found = patiently(lambda: os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in found if name.endswith(suffix) and not name.startswith("."))


def write_atomically(path: Path, text: str, mode: int = 0o644, *, durable: bool = False) -> None:
    """A reader sees the old file or the whole new one; with `durable` also after a crash of this machine."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")

    def write() -> None:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(aside, path)

    patiently(write)
