"""Records the time of a step as spans, which may overlap, for the launcher's display and hang watch."""

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
"""The spans of a step. Evaluations and checkpoints are also timed, but they are outside the step."""
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
        """Begin and end of the part of the span between two times. An open span extends to `stop`."""
        began = max(self.began, start)
        return began, max(began, stop if self.ended is None else min(self.ended, stop))


_HERE: ContextVar[_Timed | None] = ContextVar("span", default=None)
"""The span of the running task. A task inherits the span of the task that created it."""


class StepClock:
    """Records spans: begin, end and name. Time outside the spans of PHASES is a step's `time/other`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trace = TraceWriter(folder / "trace.json")
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        """Durations by name. Those of PHASES are sums over a step: a part of a batch may be nearly all of it, so no
        part has a usual duration of its own."""
        self._last: dict[str, float] = {}
        self._open: list[_Timed] = []
        self._closed: list[_Timed] = []
        """Closed spans of this step."""
        self._beside: list[tuple[int, _Timed]] = []
        """Generation of the batches of some steps, open or closed in this step."""
        self._ground = _timed("start", "")
        """The state of the job while no span is open: start-up, between two spans, or the end."""
        self._step, self._began = 0, time.monotonic()
        self.steps_done = 0

    def begin(self, step: int) -> None:
        """A new step starts now."""
        self._step, self.steps_done, self._began = step, step - 1, time.monotonic()
        self._closed.clear()
        self._stand("step", "")

    def start_up(self, detail: str) -> None:
        """Publish what start-up is waiting for."""
        self._stand("start", detail)

    def ending(self) -> None:
        """The job is ending: from now on, processes end on request."""
        self._stand("end", "")

    @contextlib.contextmanager
    def span(self, name: str, detail: str = "") -> Iterator[None]:
        """Time a block as `name`: one of PHASES, `disk`, `eval`, `save` or `export`. Blocks of different tasks may
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
            self._last[name] = mine.ended - mine.began
            if name not in PHASES or self._step == 0:
                past.append(self._last[name])
            self._open.remove(mine)
            self._closed.append(mine)
            if not self._open:
                self._stand(self._ground.span.name, self._ground.span.detail)
            else:
                self._publish()
            self._trace.write(mine.span, mine.ended - mine.began)

    @contextlib.contextmanager
    def generating(self, step: int) -> Iterator[None]:
        """Time the generation of the batch that `step` trains. The hang watch judges only what the loop waits for."""
        mine = _timed("generate", f"batch {step}")
        self._beside.append((step, mine))
        try:
            yield
        finally:
            mine.ended = time.monotonic()
            self._trace.write(mine.span, mine.ended - mine.began)

    def alive(self) -> None:
        """Record a sign of life in the span of the running task, so that it does not count as hung. Written at most
        once a second."""
        self._beat(_HERE.get())

    def alive_here(self) -> Callable[[], None]:
        """Return `alive` for the span of this task, to be called from a task created outside the span."""
        return functools.partial(self._beat, _HERE.get())

    def end(self) -> dict[str, float]:
        """End the step and return its times in seconds by metric name. A span that is open, or that began in an earlier
        step, counts only with its part in this step."""
        began, now = self._began, time.monotonic()
        self.steps_done = self._step
        parts = [(each.span.name, each.inside(began, now)) for each in (*self._closed, *self._open)
                 if each.span.name in PHASES]
        split = {metric: sum(stop - start for each, (start, stop) in parts if each == name)
                 for name, metric in PHASES.items()}
        for name, metric in PHASES.items():
            if any(each == name for each, _ in parts):
                self._past[name].append(split[metric])
        waited = [part for name, part in parts if name == "rollout"]
        generated = [each.inside(began, now) for _, each in self._beside]
        hidden = covered([*waited, *generated]) - covered(waited)
        trained = [part for name, part in parts if name in ("log-prob", "train")]
        mine = [each.inside(began, now) for step, each in self._beside if step == self._step]
        self._beside = [(step, each) for step, each in self._beside if each.ended is None]
        return {**split, "time/step": now - began, "time/rollout_hidden": hidden,
                "time/train_hidden": covered(trained) + covered(mine) - covered([*trained, *mine]),
                "idle/trainer": (split["time/rollout"] + split["time/reward"]) / (now - began),
                "idle/engines": 1.0 - (split["time/rollout"] + hidden) / (now - began),
                "time/other": max(0.0, now - began - covered([part for _, part in parts]))}

    def last(self, name: str) -> float:
        """Duration of the latest span `name` in seconds."""
        return self._last[name]

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
    """Seconds covered by at least one of the intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(parts):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def _timed(name: str, detail: str, expected_s: float | None = None) -> _Timed:
    wall, now = time.time(), time.monotonic()
    return _Timed(Span(name, detail, wall, wall, expected_s), now, now)


class TraceWriter:
    """Writes `trace.json`: the spans of an attempt, for https://ui.perfetto.dev or chrome://tracing. Each span is one
    event, and each name has its own row, or several where spans of a name overlap.

    The file is a JSON array in the Trace Event Format. The closing bracket is optional in this format, so the file of a
    killed run is still readable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[tuple[str, float]] = []
        """Name of each row, and the end of its last span."""

    def write(self, span: Span, seconds: float) -> None:
        """Append a span that took `seconds`."""
        events: list[dict[str, Any]] = []
        row = next((row for row, (name, ended) in enumerate(self._rows) if name == span.name and ended <= span.began),
                   len(self._rows))
        if row == len(self._rows):
            self._rows.append((span.name, 0.0))
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": span.name}})
        self._rows[row] = span.name, span.began + seconds
        events.append({"ph": "X", "name": span.name, "pid": 0, "tid": row,
                       "ts": round(span.began * 1e6), "dur": round(seconds * 1e6), "args": {"detail": span.detail}})
        begins = not self._path.exists()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("[\n" if begins else "") + "".join(json.dumps(event) + ",\n" for event in events))
