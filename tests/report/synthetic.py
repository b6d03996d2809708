"""A made-up history for tests of the report: a run that learns, resumed once."""

from __future__ import annotations

import json
import math
from pathlib import Path


def row(step: int, attempt: int = 1) -> dict:
    learned = 1 / (1 + math.exp(-(step - 20) / 6))
    parts = {"time/rollout": 0.4, "time/reward": 0.02, "time/train": 0.9, "time/sync": 0.2, "time/other": 0.08}
    metrics = {"step": step, "reward/mean": 0.1 + 0.8 * learned, "response/length_mean": 4 - learned,
               "response/truncated": 0.2, "train/kl": 0.01 * step, "train/entropy": 2 - learned,
               "train/grad_norm": 1.0,
               "mismatch/kl": 1e-6, "mismatch/abs_max": 1e-4 * attempt, "throughput/tokens_per_s": 900.0,
               "throughput/samples_per_s": 100.0, "time/step": sum(parts.values()), **parts}
    return metrics | ({"eval/accuracy": learned} if step % 10 == 0 else {})


def write_run(run_dir: Path, *attempts: tuple[int, int]) -> Path:
    """Attempt n holds the steps first..last of the n-th pair."""
    for number, (first, last) in enumerate(attempts, start=1):
        folder = run_dir / "attempts" / str(number)
        folder.mkdir(parents=True)
        lines = [json.dumps(row(step, number)) + "\n" for step in range(first, last + 1)]
        (folder / "metrics.jsonl").write_text("".join(lines))
    return run_dir
