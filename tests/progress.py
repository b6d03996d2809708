"""The progress of a job with a single open span."""

from __future__ import annotations

import time

from launch.run.progress import AFTER_THE_STEP, Progress, Span


def doing(step: int, name: str, detail: str = "", expected_s: float | None = None, at: float | None = None) -> Progress:
    """The span began now, or at `at`."""
    at = time.time() if at is None else at
    done = step if name in AFTER_THE_STEP else max(0, step - 1)
    return Progress(step, done, (Span(name, detail, at, at, expected_s),))
