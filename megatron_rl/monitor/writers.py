"""Writers of metrics: always JSONL, optionally TensorBoard and Weights & Biases. All take the same flat mapping."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from launch.errors import UserError


class Writer(Protocol):
    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """`metrics.jsonl`: one object per step, flushed at once and only appended.

    Steps must rise within a file. A resumed attempt writes its own file, so nothing here is ever rewritten. If two
    attempts hold the same step, `launch.run.metrics.metric_history` uses the newer one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._last_step = _last_step(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} after step {self._last_step} in {self._path}: steps must rise in a file")
        row: dict[str, float | int | str] = {"step": step, "timestamp": round(time.time(), 3)}
        row |= {name: json_number(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Event files in `folder`. `first_step` purges an earlier attempt's data from there on: a run has one curve."""

    def __init__(self, folder: Path, first_step: int, text: Mapping[str, str] | None = None) -> None:
        # Importing tensorboard's protobufs takes a second, which runs without it do not pay.
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
    """Weights & Biases, one run per run folder: a resumed attempt continues the same curve. W&B refuses to write a step
    twice, so steps that a resume repeats keep their first values there. With WANDB_MODE=offline the files stay in
    `<folder>/wandb` until `wandb sync`.

    Raises UserError if the package is missing or W&B refuses the run (no key, no connection)."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping) -> None:
        where = f"monitor.wandb_project = {project}"
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UserError("monitor.wandb_project is set, but the package wandb is not installed", where=where,
                            fix="pip install wandb, or monitor.wandb_project=null") from error
        folder.mkdir(parents=True, exist_ok=True)
        # Its own capture of the console is off: logs are in the attempt's folder, and stdout belongs to this program.
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(project=project, name=name, id=_wandb_id(folder), resume="allow", dir=str(folder),
                                   config=dict(config), settings=settings)
        except wandb.errors.Error as error:
            raise UserError(f"Weights & Biases refuses the run: {error}", where=where,
                            fix="wandb login, or WANDB_MODE=offline, or monitor.wandb_project=null") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: Path) -> str:
    """The ID of the run in `folder`, drawn once, so that a new run of the same name does not continue an old curve."""
    file = folder / "wandb-id"
    if not file.exists():
        file.write_text(secrets.token_hex(4), encoding="ascii")
    return file.read_text(encoding="ascii").strip()


def json_number(value: float) -> float | int | str:
    """JSON has no NaN, so non-finite values become strings that float() reads back."""
    number = value if isinstance(value, int) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else ("Infinity" if number > 0 else "-Infinity")


def _last_step(path: Path) -> int | None:
    """Step of the last complete line. A line truncated by a crash is dropped."""
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
