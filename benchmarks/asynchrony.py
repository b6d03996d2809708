"""`make bench-async`: seconds a step of an asynchronous run beside the ideal, at several bounds on the staleness.

A tiny job with two engines runs as a user's would. Decode and update are slowed, so that the rollout of a batch takes
three times the update and sleeps decide the times. Lengths are log-normal (sigma 0.5, cap three times the mean). The
slots of both engines hold two thirds of a batch. Every ratio compares times of one run. `--learning` compares rewards
instead, and `--scale` the driver's own seconds at the rates of a 70B plan.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks import async_learning, async_scale
from benchmarks.async_load import Load, iterations
from benchmarks.ours import QUIET, train
from benchmarks.run import machine
from launch.run.metrics import Row
from tools.pages import write_blocks

PAGE = Path(__file__).parents[1] / "docs/async.md"
CONFIG = "configs/tiny/grpo_async.yaml"
ENGINES, SLOTS, PROMPTS, GROUP, MEAN, CAP, SIGMA = 2, 32, 24, 4, 20, 60, 0.5
RATIO = 3.0
"""Rollout of a batch at full engines over the update."""
ROWS = 4096
"""Prompts: each is used once, so that every run trains the same lengths."""
NEAR, SLOWER, HIDDEN = 1.1, 1.02, 0.6
"""Aims: step over ideal at k = 2, k = 0 over the former loop (2 % is what two runs of one case differ by), and share of
the update that the overlap hides."""


@dataclass(frozen=True)
class Case:
    name: str
    max_staleness: int = 0
    former: bool = False
    overlap: bool = False

    @property
    def words(self) -> list[str]:
        return [f"algorithm.max_staleness={self.max_staleness}", *(["algorithm.overlap=true"] if self.overlap else [])]


CASES = (Case("former loop", former=True), Case("k = 0"), Case("k = 0, overlap", overlap=True),
         *(Case(f"k = {k}", k) for k in (1, 2, 4)))


@dataclass(frozen=True)
class Result:
    """Means over the measured steps of a run, in seconds."""

    step: float
    rollout: float
    """What the trainer waited for."""
    update: float
    sync: float
    iteration: float
    tokens: float
    """Tokens of a step."""
    longest: float
    """Tokens of the longest completion of a batch."""
    ages: tuple[float, float]
    """Mean and largest staleness."""

    @property
    def full(self) -> float:
        """Rollout of a batch by engines that are always full."""
        return self.tokens * self.iteration / (ENGINES * SLOTS)

    def ideal(self, bound: int) -> float:
        """max(rollout at full batch, update + sync, longest completion / (k + 1))."""
        return max(self.full, self.update + self.sync, self.longest * self.iteration / (bound + 1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-async", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half the time a step, 10 steps a case")
    parser.add_argument("--learning", action="store_true", help="rewards at k = 0 and k = 2, 5 seeds (half an hour)")
    parser.add_argument("--scale", action="store_true", help="the driver with 28 engines in virtual time (a minute)")
    parser.add_argument("--write-docs", action="store_true", help="write the table to docs/async.md")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-async"))
    parser.add_argument("--timeout", type=float, default=900.0, help="time limit of one run in seconds")
    options = parser.parse_args()
    if options.write_docs and options.quick:
        parser.error("--write-docs needs the measurement without --quick")
    folder = options.out / time.strftime("%Y%m%d-%H%M%S")
    if options.learning:
        name, text = "bench-async-learning", async_learning.compare(folder, options.timeout)
    elif options.scale:
        name, text = "bench-async-scale", async_scale.table(50 if options.quick else async_scale.STEPS)
    else:
        name, text = "bench-async", steps(folder, options.quick, options.timeout)
    print(f"\n{text}")
    if options.write_docs:
        write_blocks(PAGE, {name: text})
    return 0


def steps(folder: Path, quick: bool, timeout_s: float) -> str:
    """Measure all cases. Returns the table."""
    iteration_s, count = (0.05, 10) if quick else (0.1, 16)
    update_s = PROMPTS * GROUP * MEAN * iteration_s / (ENGINES * SLOTS) / RATIO
    load = Load(iteration_s, update_s / (PROMPTS * GROUP * MEAN), MEAN, SIGMA, CAP)
    folder.mkdir(parents=True)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{row % 10} {row // 10 % 10}=", "answer": str(row % 10)}) + "\n"
                            for row in range(ROWS)), encoding="utf-8")
    results = {}
    for case in CASES:
        warm_up = 2 * case.max_staleness + 2
        run = folder / re.sub("[^a-z0-9]+", "-", case.name)
        replace(load, former=case.former).write(run)
        print(f"{case.name}: {count} steps after {warm_up}", flush=True)
        history = train(CONFIG, run, [
            *QUIET, *case.words, "trainer.tp=1", "trainer.pp=1", "trainer.token_budget=256",
            f"rollout.replicas={ENGINES}", f"rollout.max_num_seqs={SLOTS}", f"rollout.max_new_tokens={CAP}",
            f"algorithm.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}", f"data.train={data}",
            f"workload.response.mean={MEAN}", f"run.steps={count + warm_up}",
            "trainer.optimizer.lr=1e-6"],       # no divergence, which would lower the bound
            timeout_s=timeout_s, log=run.with_suffix(".log"), command="benchmarks.async_job")
        results[case] = summary([row for row in history if row["step"] > warm_up], iterations(run))
    (folder / "bench.json").write_text(json.dumps(
        {"machine": machine(), "cases": {case.name: vars(result) for case, result in results.items()}}, indent=1))
    return table(results)


def summary(rows: list[Row], seconds: list[float]) -> Result:
    def mean(name: str) -> float:
        return fmean(row[name] for row in rows)

    return Result(step=mean("time/step"), rollout=mean("time/rollout") + mean("time/reward"), update=mean("time/train"),
                  sync=mean("time/sync"), iteration=fmean(seconds),
                  tokens=PROMPTS * GROUP * mean("response/length_mean"), longest=mean("response/length_max"),
                  ages=(mean("staleness/mean"), max(row["staleness/max"] for row in rows)))


def table(results: dict[Case, Result]) -> str:
    """The table, and the aims."""
    host = machine()
    lines = [f"{host['cpu']}, {host['cores']} cores: all seconds are measured.", "",
             f"{'':16}{'step':>8}{'ideal':>8}{'ratio':>7}{'waited':>9}{'update':>8}{'sync':>7}{'full':>7}"
             f"{'longest':>9}{'staleness':>11}"]
    for case, it in results.items():
        ideal = it.ideal(case.max_staleness)
        lines.append(f"{case.name:16}{it.step:>6.2f} s{ideal:>6.2f} s{it.step / ideal:>7.2f}{it.rollout:>7.2f} s"
                     f"{it.update:>6.2f} s{it.sync:>5.2f} s{it.full:>5.2f} s{it.longest * it.iteration:>7.2f} s"
                     f"{it.ages[0]:>7.2f}, {it.ages[1]:.0f}")
    lines += ["", "step: seconds a step, mean. waited: rollout that the trainer waited for. full: rollout of a batch",
              "by full engines. longest: longest completion of a batch. ideal: max(full, update + sync,",
              "longest / (k + 1)). staleness: mean and largest, in versions.", ""]
    return "\n".join([*lines, *aims(results)])


def aims(results: dict[Case, Result]) -> list[str]:
    by_name = {case.name: result for case, result in results.items()}
    zero, two, former = by_name["k = 0"], by_name["k = 2"], by_name["former loop"]
    ratio, slower = two.step / two.ideal(2), _busy(zero) / _busy(former)
    lines = [_aim(f"k = 2: {ratio:.2f} x the ideal", f"at most {NEAR:g}", ratio <= NEAR),
             _aim(f"k = 0: {slower:.2f} x the former loop", f"at most {SLOWER:g}", slower <= SLOWER)]
    if overlapped := by_name.get("k = 0, overlap"):
        hidden = (_busy(zero) - _busy(overlapped)) * zero.iteration / zero.update
        lines.append(_aim(f"overlap: hides {hidden:.0%} of the update", f"at least {HIDDEN:.0%}", hidden >= HIDDEN))
    return lines


def _busy(result: Result) -> float:
    """The step in iterations: a machine that slows one run down slows its iterations."""
    return result.step / result.iteration


def _aim(found: str, aim: str, met: bool) -> str:
    return f"{found} (aim: {aim}): {'met' if met else 'missed'}"


if __name__ == "__main__":
    sys.exit(main())
