"""Waiting for others: with a deadline, and saying every half minute who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launch.errors import UserError

LOOK_EVERY_S = 0.2
SAY_EVERY_S = 30.0
NAMES_SHOWN = 8


def wait_for(missing: Callable[[], Sequence[str]], what: str, deadline_s: float, *,
             say: Callable[[str], None], check: Callable[[], None] = lambda: None) -> list[str]:
    """Wait until nobody is missing; returns who still is at the deadline ([]: all have come).

    Args:
        missing: who has not come yet. What is waited for comes through files of a shared file system: it is polled.
        what: `to greet`, for the lines that say who is missing.
        say: gets those lines.
        check: called between two looks; what it raises ends the wait.
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
        time.sleep(LOOK_EVERY_S)  # between two looks at a shared file system, which tells nobody of changes


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float, *, say: Callable[[str], None],
               check: Callable[[], None] = lambda: None) -> None:
    """Wait until a condition holds.

    Raises:
        UserError: it does not within `deadline_s`.
    """
    if wait_for(lambda: [] if condition() else [what], "", deadline_s, say=say, check=check):
        raise UserError(f"waited {deadline_s:.0f} s in vain for {what}", where="run.deadline_s",
                        fix="see the logs; raise run.deadline_s if this machine is only slow")


def listed(names: Sequence[str], shown: int = NAMES_SHOWN) -> str:
    """`n1, n2 and 5 more`."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
