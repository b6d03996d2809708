"""Real processes, each of which holds an object and answers calls of its methods over a pipe."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.ranks import PRELOAD


class Pipe:
    """Calls over a connection, one after the other: a call that was cancelled still takes its answer out of it."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._thread = connection, ThreadPoolExecutor(1)

    async def call(self, method: str, args: tuple) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, method, args)

    def _exchange(self, method: str, args: tuple) -> Any:
        self._connection.send((method, args))
        return self._connection.recv()


@contextmanager
def processes_of(makers: Sequence[tuple[Callable[..., Any], tuple]]) -> Iterator[list[tuple[Any, Any]]]:
    """(connection, process) of each object: a function that makes it in its process, and the arguments."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    made: list[tuple[Any, Any]] = []
    try:
        for make, args in makers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
            process.start()
            theirs.close()
            made.append((ours, process))
        yield made
    finally:
        for connection, _ in made:
            connection.close()
        for _, process in made:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(connection: Any, make: Callable[..., Any], args: tuple) -> None:
    import torch

    torch.set_num_threads(1)
    target = make(*args)
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, getattr(target, method)(*given)))
        except Exception as error:
            connection.send((True, RuntimeError(f"{type(error).__name__}: {error}")))
