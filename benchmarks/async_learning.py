"""Rewards of runs that train stale samples, for `make bench-async ARGS=--learning`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from benchmarks.ours import QUIET, train
from launch.run.metrics import Row, series

CONFIG, WINDOW, SEEDS, LOSS = "configs/tiny/grpo_async.yaml", 10, (1, 2, 3, 4, 5), 0.05
CASES = {"k = 0": ("algorithm.max_staleness=0",),
         "k = 2, importance_cap 2": ("algorithm.max_staleness=2", "algorithm.importance_cap=2.0"),
         "k = 2, no correction": ("algorithm.max_staleness=2", "algorithm.importance_cap=null")}
"""Equal steps are equal samples. With one update a batch the ratio to the current policy is 1, so only the importance
weights correct."""


def compare(folder: Path, timeout_s: float) -> str:
    """Train every case from all seeds. Returns the table of the mean reward over the last steps, and over all steps,
    with the mean staleness of what was trained: the run may lower the bound."""
    runs: dict[str, list[list[Row]]] = {name: [] for name in CASES}
    for seed in SEEDS:
        for number, (name, words) in enumerate(CASES.items()):
            run = folder / f"seed-{seed}-case-{number}"
            runs[name].append(train(CONFIG, run, [*QUIET, "trainer.tp=1", "trainer.pp=1", f"run.seed={seed}", *words],
                                    timeout_s=timeout_s, log=run.with_suffix(".log")))
            print(f"{name}, seed {seed}: {fmean(_rewards(runs[name][-1])[-WINDOW:]):.3f}", flush=True)
    lines = [f"{'':26}{f'last {WINDOW} steps':>16}{'over the seeds':>18}{'all steps':>12}{'staleness':>12}"]
    ends = {name: [fmean(_rewards(each)[-WINDOW:]) for each in histories] for name, histories in runs.items()}
    for name, histories in runs.items():
        stale = fmean(fmean(series(each, "staleness/mean")[1]) for each in histories)
        lines.append(f"{name:26}{fmean(ends[name]):>16.3f}{f'+- {stdev(ends[name]):.3f}':>18}"
                     f"{fmean(fmean(_rewards(each)) for each in histories):>12.3f}{stale:>12.2f}")
    zero, two, _ = (fmean(each) for each in ends.values())
    under = 1 - two / zero
    return "\n".join([*lines, "", f"k = 2 with truncated importance weights: {under:.1%} under k = 0 (aim: at most "
                      f"{LOSS:.0%}): {'met' if under <= LOSS else 'missed'}"])


def _rewards(history: list[Row]) -> list[float]:
    return series(history, "reward/mean")[1]
