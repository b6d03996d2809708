"""A meeting of processes through a shared folder: for the stub workload, which has no collectives."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from launch.files.shared import seen

LOOK_EVERY_S = 0.02


def arrive(folder: Path, name: str, text: str = "") -> None:
    """Leave a sign, whole from the first moment."""
    aside = folder / f".{name}"
    aside.write_text(text, encoding="utf-8")
    aside.replace(folder / name)


def meet(folder: Path, names: list[str], deadline_s: float) -> None:
    """Wait until all signs are there.

    Raises:
        TimeoutError: naming who has not come.
    """
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while missing := [name for name in names if not seen(folder / name)]:
        if time.monotonic() > end:
            raise TimeoutError(f"did not arrive within {deadline_s:.0f} s: {', '.join(missing)}")
        pause.wait(LOOK_EVERY_S)
