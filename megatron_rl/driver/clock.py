"""Where the time of a step goes: one phase at a time, published for the launcher's display and hang watch."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from launch.run.progress import write_progress

PHASES = {"rollout": "time/rollout", "reward": "time/reward", "log-prob": "time/logprob", "train": "time/train",
          "sync": "time/sync"}
"""The phases that make a step; evaluations and checkpoints are timed too, outside of it."""
BEAT_EVERY_S = 1.0
REMEMBERED = 16


class StepClock:
    """Times the phases of each step. Phases do not overlap; what is in none of them is `time/other`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._seconds: dict[str, float] = defaultdict(float)
        self._step, self._phase, self._detail, self._beat = 0, "start", "", 0.0
        self._began = time.monotonic()
        self.steps_done = 0

    def begin(self, step: int) -> None:
        """A new step starts now."""
        self._step, self._seconds, self._began = step, defaultdict(float), time.monotonic()

    def start_up(self, detail: str) -> None:
        """Say what start-up is waiting for."""
        self._enter("start", detail)

    def ending(self) -> None:
        """From here on processes end because they are asked to."""
        self._enter("end", "")

    @contextlib.contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Time a block as `name`: one of PHASES, `disk`, `eval`, `save` or `export`."""
        self._enter(name, detail)
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self._seconds[name] += seconds
            self._past[name].append(seconds)

    def alive(self) -> None:
        """Something arrived inside the current phase: the job does not hang. Written at most once a second."""
        if time.monotonic() - self._beat > BEAT_EVERY_S:
            self._enter(self._phase, self._detail)

    def end(self) -> dict[str, float]:
        """The step is over: its times, by metric name."""
        total = time.monotonic() - self._began
        split = {metric: self._seconds[name] for name, metric in PHASES.items()}
        self.steps_done = self._step
        return {**split, "time/step": total, "time/other": max(0.0, total - sum(split.values()))}

    def last(self, name: str) -> float:
        """Seconds of the latest phase `name`."""
        return self._past[name][-1]

    def _enter(self, phase: str, detail: str) -> None:
        self._phase, self._detail, self._beat = phase, detail, time.monotonic()
        past = self._past.get(phase)
        write_progress(self._folder, self._step, phase, detail, statistics.median(past) if past else None)
