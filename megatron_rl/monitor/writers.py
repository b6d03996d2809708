"""Where metrics go: JSONL always, TensorBoard and Weights & Biases by config. All take the same flat mapping."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from launch.errors import UserError


class Writer(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """`metrics.jsonl`: one object a step, flushed at once, only ever appended to.

    Steps must rise within a file. An attempt that is resumed writes a file of its own, so nothing here is ever
    rewritten; `launch.report.history.read_history` lets the newer attempt win where two hold the same step.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._last_step = _last_step(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step} in {self._path}: steps must rise in a file")
        row = {"step": step, "timestamp": round(time.time(), 3)}
        row |= {name: json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Event files in `folder`. `first_step` purges what an earlier attempt wrote from there on: one curve a run."""

    def __init__(self, folder: Path, first_step: int, text: Mapping[str, str] | None = None) -> None:
        # tensorboard's protobufs take a second to import; runs that switch it off do not pay for it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
        for title, body in (text or {}).items():
            self._writer.add_text(title, f"```\n{body}\n```", global_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases, one run a run name: a resumed attempt goes on with the same curve.

    Raises UserError when `monitor.wandb_project` is set and the package is missing."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UserError(f"monitor.wandb_project is {project!r}, but the package wandb is not installed",
                            where="monitor.wandb_project",
                            fix="pip install wandb, or monitor.wandb_project=null") from error
        self._run = wandb.init(project=project, name=name, id=name, resume="allow", dir=str(folder),
                               config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def json_number(value: float) -> float | int | str:
    """JSON has no NaN: non-finite values become the strings that float() reads back."""
    number = value if isinstance(value, int) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _last_step(path: Path) -> int | None:
    """Step of the last complete line. A line that a crash cut short is dropped."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    if lines[-1]:
        complete = len(text.encode()) - len(lines[-1].encode())
        with path.open("r+b") as file:
            file.truncate(complete)
        lines[-1] = ""
    written = [line for line in lines if line]
    return int(json.loads(written[-1])["step"]) if written else None
