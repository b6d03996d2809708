"""Waiting with a deadline. Every half minute a line reports what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launch.errors import UserError

LOOK_EVERY_S = 0.2
SAY_EVERY_S = 30.0
NAMES_SHOWN = 8


def wait_for(missing: Callable[[], Sequence[str]], what: str, deadline_s: float, *,
             say: Callable[[str], None], check: Callable[[], object] = lambda: None) -> list[str]:
    """Wait until nothing is missing. Returns what is still missing at the deadline ([] if all have arrived).

    Args:
        missing: names what has not arrived. It is polled, because it comes through files of a shared file system.
        what: `to greet`, for the lines that report what is missing.
        say: receives those lines.
        check: called between two polls. An exception that it raises ends the wait.
    """
    began = told = time.monotonic()
    while True:
        left = list(missing())
        now = time.monotonic()
        if not left or now - began >= deadline_s:
            return left
        check()
        if now - told >= SAY_EVERY_S:
            told = now
            say(f"waiting for {listed(left)} {what} ({now - began:.0f} of at most {deadline_s:.0f} s)")
        time.sleep(LOOK_EVERY_S)  # between two polls of a shared file system, which does not report changes


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float, *, say: Callable[[str], None],
               check: Callable[[], None] = lambda: None) -> None:
    """Wait until a condition holds.

    Raises:
        UserError: it does not hold within `deadline_s`.
    """
    if wait_for(lambda: [] if condition() else [what], "", deadline_s, say=say, check=check):
        raise UserError(f"waited {deadline_s:.0f} s for {what}, which did not happen", where="run.deadline_s",
                        fix="see the logs; raise run.deadline_s if this machine is only slow")


def listed(names: Sequence[str], shown: int = NAMES_SHOWN) -> str:
    """`n1, n2 and 5 more`."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
