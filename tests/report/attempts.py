"""Attempts as launcher and job write them, for tests of what is read from them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launch.run.attempts import Attempt
from launch.run.components import ComponentRecord, Pid, record_error
from launch.run.outcome import Outcome, write_outcome
from launch.run.progress import write_progress
from tests.progress import doing

NOW = time.mktime(time.strptime("2026-11-29 18:00:00", "%Y-%m-%d %H:%M:%S"))


class Made:
    """An attempt that is written piece by piece.

    made = Made(tmp_path, "grpo").on_nodes(["n1", "n2"]).checked("n1")
    """

    def __init__(self, runs: Path, name: str, number: int = 1, steps: int = 500) -> None:
        self.run = runs / name
        self.folder = self.run / "attempts" / str(number)
        for each in ("logs", "components", "stacks", "errors", "nodes"):
            (self.folder / each).mkdir(parents=True)
        (self.folder / "config.yaml").write_text(f"run:\n  name: {name}\n  steps: {steps}\n")
        self.attempt = Attempt(self.folder)
        self.nodes: list[str] = []

    def on_nodes(self, nodes: Sequence[str], job: str = "4711", **facts: object) -> Made:
        self.nodes = list(nodes)
        values = {"job_id": job, "nodes": self.nodes, "end_time": NOW + 3600, "restart_count": 0,
                  "partition": "batch"}
        (self.folder / "job.json").write_text(json.dumps({**values, **facts}))
        for node in nodes:
            (self.folder / "nodes" / node).mkdir()
            self.beat(node, NOW)
        os.utime(self.folder / "job.json", (NOW - 600, NOW - 600))
        return self

    def beat(self, node: str, at: float) -> Made:
        path = self.folder / "nodes" / node / "beat"
        path.touch()
        os.utime(path, (at, at))
        return self

    def checked(self, *nodes: str) -> Made:
        for node in nodes:
            (self.folder / "nodes" / node / "preflight.json").write_text("{}")
        return self

    def placed(self, nodes: Sequence[str], spares: Sequence[str] = ()) -> Made:
        (self.folder / "placement.json").write_text(json.dumps({"nodes": list(nodes), "spares": list(spares)}))
        return self

    def ray(self, *nodes: str) -> Made:
        for node in nodes:
            (self.folder / "nodes" / node / "ray.json").write_text("{}")
        return self

    def progress(self, step: int, phase: str, detail: str = "") -> Made:
        write_progress(self.folder, doing(step, phase, detail, at=NOW - 5))
        return self

    def metrics(self, *rows: dict[str, float]) -> Made:
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self

    def checkpoint(self, step: int, age_s: float, complete: bool = True) -> Made:
        folder = self.run / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "complete.json").write_text("{}")
            os.utime(folder / "complete.json", (NOW - age_s, NOW - age_s))
        return self

    def log(self, name: str, text: str, node: str = "local", started: float = NOW - 300) -> Made:
        path = self.folder / "logs" / f"{name}.log"
        path.write_text(text)
        record = ComponentRecord(name, Pid(1, started), node, str(path))
        path = self.folder / "components" / node / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(record)))
        return self

    def error(self, name: str, at: float, summary: str, traceback: str = "", users: bool = False) -> Made:
        record_error(self.attempt, name, summary, traceback or f"Traceback (most recent call last):\n{summary}",
                     user_error=users)
        path = self.folder / "errors" / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": at}))
        return self

    def ended(self, status: str, step: int, message: str = "", **more: object) -> Made:
        write_outcome(self.folder, Outcome(status=status, step=step, message=message, **more))
        return self


def stamp(at: float) -> str:
    """As Python's logging writes it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f",{int(at % 1 * 1000):03d}"
