"""vLLM's worker with iterations of a given length, for `benchmarks.async_load`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_rl.weight_sync.ends.vllm_plugin import WeightSyncWorker

IDLE = 3.0
"""Iterations that follow one another by more than this multiple of the given length had nothing to do between them."""


class SlowWorker(WeightSyncWorker):
    def slow_down(self, seconds: float, file: str) -> None:
        """Begin an iteration no sooner than `seconds` after the last one began. Writes the seconds between iterations
        that follow one another to `file`."""
        runner: Any = self.model_runner     # type: ignore[attr-defined]  # vLLM adds this class to its worker's bases
        execute, begins = runner.execute_model, 0.0
        out = Path(file).open("w", encoding="utf-8", buffering=1)

        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal begins
            time.sleep(max(0.0, begins + seconds - time.monotonic()))
            now = time.monotonic()
            if now - begins < IDLE * seconds:
                out.write(f"{now - begins:.4f}\n")
            begins = now
            return execute(*args, **kwargs)

        runner.execute_model = slow
