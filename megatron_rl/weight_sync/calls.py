"""Calls to many members at the same time. Every failure and every missing answer keeps its member's name."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megatron_rl.weight_sync.protocol import SyncError


class NoAnswer(Exception):
    """A member did not answer before the deadline."""


async def outcomes(calls: Mapping[str, Awaitable | Any], deadline: float, *, first_failure: bool = False,
                   arrived: Callable[[str, Any], None] = lambda name, outcome: None) -> dict[str, Any]:
    """Each member's answer, the exception that it raised, or `NoAnswer`.

    Args:
        deadline: on the clock of `time.monotonic()`.
        first_failure: return as soon as one call has failed; the others count as not answered.
        arrived: called with each outcome as it arrives.
    """
    tasks = {asyncio.ensure_future(_awaitable(call)): name for name, call in calls.items()}
    found: dict[str, Any] = {}
    try:
        while len(found) < len(tasks) and not (first_failure and _failed(found)):
            waiting = [task for task, name in tasks.items() if name not in found]
            done, _ = await asyncio.wait(waiting, timeout=max(0.0, deadline - time.monotonic()),
                                         return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in sorted(done, key=list(tasks).index):
                found[tasks[task]] = _outcome(task)
                arrived(tasks[task], found[tasks[task]])
    finally:
        for task, name in tasks.items():
            if name not in found:
                task.cancel()
    return {name: found.get(name, NoAnswer(f"{name} did not answer")) for name in calls}


async def answers(calls: Mapping[str, Awaitable | Any], deadline: float, *, first_failure: bool = False) -> list[Any]:
    """The answers in order.

    Raises:
        SyncError: members failed, or did not answer before the deadline; the message names them.
    """
    found = await outcomes(calls, deadline, first_failure=first_failure)
    raise_failures(found)
    return list(found.values())


def raise_failures(found: Mapping[str, Any]) -> None:
    """Raise SyncError if a member raised or did not answer."""
    failed = _failed(found)
    if failed:
        message = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise SyncError(message) from next(iter(failed.values()))
    missing = sorted(name for name, outcome in found.items() if isinstance(outcome, NoAnswer))
    if missing:
        raise SyncError(f"no answer in time from {', '.join(missing)}")


def _failed(found: Mapping[str, Any]) -> dict[str, BaseException]:
    return {name: outcome for name, outcome in found.items()
            if isinstance(outcome, BaseException) and not isinstance(outcome, NoAnswer)}


def _outcome(task: asyncio.Future) -> Any:
    """The answer of a call that is done, or its exception. A call that was cancelled from outside failed."""
    if task.cancelled():
        return RuntimeError("the call was cancelled")
    error = task.exception()
    return task.result() if error is None else error


def _awaitable(call: Awaitable | Any) -> Awaitable:
    if inspect.isawaitable(call):
        return call
    raise TypeError(f"a handle's method must return an awaitable, not {type(call).__name__}")
