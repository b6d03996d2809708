"""`make bench-learning`: trains the tiny policy from five other seeds, of which at least four must learn.

A run has learned if its mean reward is at most 0.2 at first and at least 0.9 over the last ten steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.ours import QUIET, train
from launch.report.run.display import duration, sparkline
from launch.run.metrics import Row, series, smoothed

START, GOAL, WINDOW = 0.2, 0.9, 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/tiny/grpo.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--required", type=int, default=4, help="runs that must learn")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--timeout", type=float, default=900.0, help="time limit of one run in seconds")
    arguments = parser.parse_args()

    folder = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    learned = 0
    for seed in arguments.seeds:
        history = train(arguments.config, folder / f"seed-{seed}", [*QUIET, f"run.seed={seed}"],
                        timeout_s=arguments.timeout, log=folder / f"seed-{seed}.log")
        learned += report(seed, history)
    verdict = "enough" if learned >= arguments.required else "too few"
    print(f"{learned} of {len(arguments.seeds)} seeds learned: {verdict} ({arguments.required} are required)")
    print(f"runs in {folder}")
    return 0 if learned >= arguments.required else 1


def report(seed: int, history: list[Row]) -> bool:
    """Print one line about the run. Returns True if it has learned."""
    steps, rewards = series(history, "reward/mean")
    means = smoothed(rewards, WINDOW)
    first, last = rewards[0], means[-1]
    reached = next((step for step, mean in zip(steps, means, strict=True) if mean >= GOAL), None)
    seconds = sum(row.get("time/step", 0.0) for row in history)
    learned = first <= START and last >= GOAL
    print(f"seed {seed}: reward {first:.3f} -> {last:.3f} {sparkline(means[::max(1, len(means) // 20)])}  "
          f"{GOAL} {'never reached' if reached is None else f'reached at step {reached}'}  "
          f"{duration(seconds)} in {len(steps)} steps  {'learned' if learned else 'NOT learned'}", flush=True)
    return learned


if __name__ == "__main__":
    raise SystemExit(main())
