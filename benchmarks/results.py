"""`make results`: trains the real model and writes docs/results.md with its figures and plots. Exits with code 1 if the
gain in accuracy is below 10 points or may be chance (p >= 0.05).

Greedy accuracy is measured on the same held-out questions before and after, and compared by McNemar's exact test.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ours import train
from benchmarks.run import machine
from launch.report.run.charts import svg_charts
from launch.report.run.terminal import mean_split
from launch.run.metrics import Row

CONFIG = "configs/135m/grpo.yaml"
GAIN, SIGNIFICANCE = 0.10, 0.05
PAGE, IMAGES = Path("docs/results.md"), Path("docs/images")
PLOTS = {"reward": "reward and held-out accuracy", "mismatch": "engine against trainer", "split": "time of a step"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the configuration")
    parser.add_argument("--out", type=Path, default=Path("runs/results"))
    parser.add_argument("--timeout", type=float, default=3600.0, help="time limit of the run in seconds")
    parser.add_argument("--no-page", action="store_true", help="print the figures and do not write to docs/")
    arguments = parser.parse_args()

    run_dir = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    history = train(CONFIG, run_dir, arguments.overrides, timeout_s=arguments.timeout,
                    log=run_dir.with_suffix(".log"))
    last = history[-1]["step"]
    attempt = run_dir / "attempts" / "1"
    before, after = answers(attempt / "eval-000000.jsonl"), answers(attempt / f"eval-{last:06d}.jsonl")
    result = compare(before, after)
    page = render(history, result, arguments.overrides)
    print(page)
    if not arguments.no_page:
        IMAGES.mkdir(parents=True, exist_ok=True)
        charts = svg_charts(history)
        for name in PLOTS:
            (IMAGES / f"135m-{name}.svg").write_text(charts[name], encoding="utf-8")
        PAGE.write_text(page, encoding="utf-8")
        print(f"written to {PAGE} and {IMAGES}")
    missed = shortfall(result)
    print(missed or "the target is met")
    return 1 if missed else 0


def shortfall(result: dict[str, float]) -> str | None:
    """How the target (a gain of GAIN at p < SIGNIFICANCE) is missed; None if it is met."""
    gain = result["after"] - result["before"]
    reasons = []
    if gain < GAIN - 1e-9:
        reasons.append(f"the gain is {100 * gain:.1f} points, below {100 * GAIN:.0f}")
    if result["p"] >= SIGNIFICANCE:
        reasons.append(f"p = {result['p']:.2g}, not below {SIGNIFICANCE}")
    return f"the target is missed: {'; '.join(reasons)}" if reasons else None


def answers(path: Path) -> dict[int, bool]:
    """Question -> whether the answer was right, in one evaluation, without those that are neither right nor wrong."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {row["index"]: row["right"] for row in rows if row["right"] is not None}


def compare(before: dict[int, bool], after: dict[int, bool]) -> dict[str, float]:
    """Accuracies on the same questions, and the two-sided p of McNemar's exact test: a binomial test of a fair coin on
    the questions whose answer changed (McNemar, Psychometrika 12, 1947)."""
    if before.keys() != after.keys():
        raise ValueError("the two evaluations did not grade the same questions")
    gained = sum(after[question] and not before[question] for question in before)
    lost = sum(before[question] and not after[question] for question in before)
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    return {"questions": len(before), "before": sum(before.values()) / len(before),
            "after": sum(after.values()) / len(after), "gained": gained, "lost": lost, "p": min(1.0, 2 * tail)}


def render(history: Sequence[Row], result: dict[str, float], overrides: Sequence[str]) -> str:
    """The page. All its figures come from this run."""
    rows = [row for row in history if row["step"] > 0]
    split = mean_split(rows)
    mean = split["time/step"]
    parts = ", ".join(f"{name.removeprefix('time/')} {split[name]:.1f} s ({split[name] / mean:.1%})"
                      for name in ("time/rollout", "time/reward", "time/logprob", "time/train", "time/sync",
                                   "time/other") if name in split)
    host = machine()
    command = " ".join(["make results", *([f'ARGS="{" ".join(overrides)}"'] if overrides else [])])
    images = "\n\n".join(f"![{text}](images/135m-{name}.svg)" for name, text in PLOTS.items())
    return f"""# Results: a real model on two cores

SmolLM2-135M-Instruct (4-bit weights of the published GGUF, dequantised) learns sums that are asked in words through its
own chat template: `{CONFIG}`, PP2 with tied embeddings on two stages, vLLM TP1, every weight sync verified.
Measured on {host['cpu']}, {host['cores']} cores, by

    {command}

which also writes this page and its plots.

| held-out questions, greedy | before | after {len(rows)} steps |
|---|---|---|
| right answers, of {result['questions']} | {result['before']:.1%} | {result['after']:.1%} |

{result['gained']} answers became right and {result['lost']} wrong. McNemar's exact test on the same questions gives
p = {result['p']:.2g}.

The reward of a batch, sampled at temperature 1, went from {_mean(rows[:3]):.3f} (first three steps) to
{_mean(rows[-3:]):.3f} (last three). The largest difference between engine and trainer log-probs of a token was
{max(row['mismatch/abs_max'] for row in rows):.3f} nats, the mean {_mean(rows, 'mismatch/abs_mean'):.4f}.

A step took {mean:.1f} s: {parts}.

{images}
"""


def _mean(rows: Sequence[Row], name: str = "reward/mean") -> float:
    return sum(row[name] for row in rows) / len(rows)


if __name__ == "__main__":
    raise SystemExit(main())
