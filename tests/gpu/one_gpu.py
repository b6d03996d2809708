"""Run a training rank on the GPU, in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.ranks import Rank, free_port


def on_gpu(function: Callable[..., Any], *args: Any, timeout: float = 200.0) -> Any:
    """What `function(Rank, *args)` returns as the only rank of a world.

    The process starts fresh: CUDA does not survive the fork that `tests.ranks` uses, and Megatron keeps its groups
    for the life of a process. An exception comes back with its traceback.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, Rank(0, 1, "127.0.0.1", free_port(), timeout), *args).result(timeout)
