"""Where the time of a step goes: spans, which may overlap, published for the launcher's display and hang watch."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.run.progress import Progress, Span, write_progress

PHASES = {"rollout": "time/rollout", "reward": "time/reward", "log-prob": "time/logprob", "train": "time/train",
          "sync": "time/sync"}
"""The spans that make a step; evaluations and checkpoints are timed too, outside of it."""
BEAT_EVERY_S = 1.0
REMEMBERED = 16


@dataclass(eq=False)
class _Timed:
    """A span with its times on the monotonic clock."""

    span: Span
    began: float
    beat: float
    ended: float | None = None

    def inside(self, start: float, stop: float) -> tuple[float, float]:
        """Begin and end of what lies between two times; an open span goes on to the second."""
        began = max(self.began, start)
        return began, max(began, stop if self.ended is None else min(self.ended, stop))


_HERE: ContextVar[_Timed | None] = ContextVar("span", default=None)
"""The span that the running task is in. Tasks inherit that of the task that made them."""


class StepClock:
    """Records spans: begin, end and name. What is in no span of PHASES is a step's `time/other`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trace = TraceWriter(folder / "trace.json")
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._open: list[_Timed] = []
        self._closed: list[_Timed] = []
        """Of this step."""
        self._ground = _timed("start", "")
        """What the job is in while no span is open: start-up, the time between two spans, the end."""
        self._step, self._began = 0, time.monotonic()
        self.steps_done = 0

    def begin(self, step: int) -> None:
        """A new step starts now."""
        self._step, self.steps_done, self._began = step, step - 1, time.monotonic()
        self._closed.clear()
        self._stand("step", "")

    def start_up(self, detail: str) -> None:
        """Say what start-up is waiting for."""
        self._stand("start", detail)

    def ending(self) -> None:
        """From here on processes end because they are asked to."""
        self._stand("end", "")

    @contextlib.contextmanager
    def span(self, name: str, detail: str = "") -> Iterator[None]:
        """Time a block as `name`: one of PHASES, `disk`, `eval`, `save` or `export`. Blocks of several tasks may
        overlap."""
        past = self._past[name]
        mine = _timed(name, detail, statistics.median(past) if past else None)
        self._open.append(mine)
        outer = _HERE.set(mine)
        self._publish()
        try:
            yield
        finally:
            _HERE.reset(outer)
            mine.ended = time.monotonic()
            past.append(mine.ended - mine.began)
            self._open.remove(mine)
            self._closed.append(mine)
            if not self._open:
                self._stand(self._ground.span.name, self._ground.span.detail)
            else:
                self._publish()
            self._trace.write(mine.span, mine.ended - mine.began)

    def alive(self) -> None:
        """Something arrived in the span that the running task is in: it does not hang. Written at most once a second.
        """
        self._beat(_HERE.get())

    def alive_here(self) -> Callable[[], None]:
        """`alive` of this task's span, for a task that was made outside of it."""
        return functools.partial(self._beat, _HERE.get())

    def end(self) -> dict[str, float]:
        """The step is over: its times, by metric name. Of a span that is open, or began in an earlier step, what lies
        in this one."""
        began, now = self._began, time.monotonic()
        self.steps_done = self._step
        parts = [(each.span.name, each.inside(began, now)) for each in (*self._closed, *self._open)
                 if each.span.name in PHASES]
        split = {metric: sum(stop - start for each, (start, stop) in parts if each == name)
                 for name, metric in PHASES.items()}
        return {**split, "time/step": now - began,
                "time/other": max(0.0, now - began - covered([part for _, part in parts]))}

    def last(self, name: str) -> float:
        """Seconds of the latest span `name`."""
        return self._past[name][-1]

    def _stand(self, name: str, detail: str) -> None:
        self._ground = _timed(name, detail)
        self._publish()

    def _beat(self, mine: _Timed | None) -> None:
        mine = self._ground if mine is None else mine
        if time.monotonic() - mine.beat > BEAT_EVERY_S:
            mine.beat, mine.span = time.monotonic(), replace(mine.span, at=time.time())
            self._publish()

    def _publish(self) -> None:
        spans = tuple(each.span for each in self._open) or (self._ground.span,)
        write_progress(self._folder, Progress(self._step, self.steps_done, spans))


def covered(parts: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(parts):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _timed(name: str, detail: str, expected_s: float | None = None) -> _Timed:
    wall, now = time.time(), time.monotonic()
    return _Timed(Span(name, detail, wall, wall, expected_s), now, now)


class TraceWriter:
    """`trace.json`: the spans of an attempt, for https://ui.perfetto.dev or chrome://tracing. One event a span, on a
    row of its own for each name.

    It is in the Trace Event Format, as a JSON array. The closing bracket is optional there, so that a run that is
    killed leaves a file that can be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, int] = {}

    def write(self, span: Span, seconds: float) -> None:
        """`seconds`: how long it took."""
        events: list[dict[str, Any]] = []
        if span.name not in self._rows:
            self._rows[span.name] = len(self._rows)
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": self._rows[span.name],
                           "args": {"name": span.name}})
        events.append({"ph": "X", "name": span.name, "pid": 0, "tid": self._rows[span.name],
                       "ts": round(span.began * 1e6), "dur": round(seconds * 1e6), "args": {"detail": span.detail}})
        begins = not self._path.exists()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("[\n" if begins else "") + "".join(json.dumps(event) + ",\n" for event in events))
