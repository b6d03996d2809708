"""Work beside the trainer's own thread: reading and writing a checkpoint.

A thread, and not a process as in Megatron's asynchronous save: a fork inherits the CUDA context, NCCL's threads and
Ray's sockets, none of which survive it, and its memory counts a second time as soon as the parent writes. The work is
in the operating system's reads and writes, which do not hold the interpreter's lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_rl.layouts.step_folder import Transferred

Result = TypeVar("Result")


class Transfer(Generic[Result]):
    """Bytes that a thread reads or writes.

    Args:
        work: called in the thread with a function that is to be told every number of bytes moved, from any thread.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], Result]) -> None:
        self._nbytes, self._began, self._ended = 0, time.monotonic(), math.inf
        self._lock, self._done = threading.Lock(), threading.Event()
        self._result: list[Result] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True).start()

    def _run(self, work: Callable[[Callable[[int], None]], Result]) -> None:
        try:
            self._result.append(work(self._moved))
        except BaseException as error:
            self._error = error
        finally:
            self._ended = time.monotonic()
            self._done.set()

    def _moved(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes

    def progress(self, within_s: float) -> Transferred:
        """How far it is. Returns when it ends, well or not, at the latest after `within_s` seconds."""
        finished = self._done.wait(within_s)
        return Transferred(self._nbytes, min(time.monotonic(), self._ended) - self._began, finished)

    def result(self) -> Result:
        """Wait for the end.

        Raises:
            The error of the thread.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]
