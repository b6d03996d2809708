"""`trace.json`: the spans of an attempt, for https://ui.perfetto.dev or chrome://tracing.

It is in the Trace Event Format, as a JSON array. The closing bracket is optional there, so that a run that is killed
leaves a file that can be read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.run.progress import Span


class TraceWriter:
    """Appends one event a span, on a row of its own for each name."""

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
