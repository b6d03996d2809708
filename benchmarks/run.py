"""`make bench`: measures samples/s of this project and of TRL's GRPOTrainer, one after the other on this machine.

Both train the same configuration. Start-up and the first steps are not counted. Writes bench.json and bench.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.ours import QUIET, run_logged, train
from launch.config.load import load_config
from launch.run.metrics import SPLIT, Row


@dataclass(frozen=True)
class Case:
    """One configuration to measure, with the number of steps of each side, including warm-up."""

    config: str
    steps: int
    trl_steps: int
    warmup: int = 2
    ours: tuple[str, ...] = ()
    """Overrides of our side only, for keys that TRL does not have."""


AIM = 2.0
"""Target ratio to TRL's samples/s."""
CASES = {
    "tiny": Case("configs/tiny/grpo.yaml", steps=24, trl_steps=12, ours=("trainer.tp=1", "trainer.pp=1")),
    # 64 samples per step with at most 24 new tokens: TRL takes about 20 s per step on two cores.
    "135m": Case("configs/135m/grpo.yaml", steps=8, trl_steps=4, warmup=1),
}


PAGE = Path("docs/bench.md")
INTRODUCTION = """# Throughput compared with TRL

    make bench

trains the same model on the same prompts with the same G, lengths and precision with this project and with TRL's
GRPOTrainer (newest release, plain generation), one after the other on one machine. TRL uses all cores; here each
training rank uses one and the engine `rollout.threads` (tiny: 1, 135M: 2). Start-up and the first steps are not
counted, nor are checkpoints and evaluation. The tiny model is measured with one training rank, the 135M model as
shipped (PP2).

For other overrides: `make bench ARGS="--set KEY=VALUE"`. Written by `make bench ARGS=--write-docs`.

"""


def main() -> int:
    arguments = parse_arguments()
    folder = arguments.out / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    results = {name: measure(name, CASES[name], folder, arguments) for name in arguments.cases}
    document = {"machine": machine(), "cases": results}
    (folder / "bench.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    page = markdown(document)
    (folder / "bench.md").write_text(page, encoding="utf-8")
    print(f"\n{page}\nwritten to {folder}")
    if arguments.write_docs:
        PAGE.write_text(INTRODUCTION + page, encoding="utf-8")
        print(f"and to {PAGE}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--trl-packages", type=Path, default=Path(".bench-packages"), help="folder that contains trl")
    parser.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="KEY=VALUE",
                        help="overrides of the configuration, for both sides")
    parser.add_argument("--write-docs", action="store_true", help="write docs/bench.md")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--timeout", type=float, default=1800.0, help="time limit of one side of one case in seconds")
    return parser.parse_args()


def measure(name: str, case: Case, folder: Path, arguments: argparse.Namespace) -> dict:
    """Measure both sides of one case, ours first."""
    print(f"{name}: megatron-rl, {case.steps} steps", flush=True)
    history = train(case.config, folder / f"{name}-ours",
                    [*QUIET, *case.ours, *arguments.overrides, f"run.steps={case.steps}"],
                    timeout_s=arguments.timeout, log=folder / f"{name}-ours.log")
    ours = summarise(history, case, arguments.overrides)
    print(f"{name}: TRL, {case.trl_steps} steps", flush=True)
    trl = baseline(case, folder / f"{name}-trl.json", arguments)
    return {"config": case.config, "overrides": arguments.overrides, "our_overrides": list(case.ours), "ours": ours,
            "trl": trl, "ratio": ours["samples_per_s"] / trl["samples_per_s"]}


def summarise(history: Sequence[Row], case: Case, overrides: Sequence[str]) -> dict:
    """Rates over the steps after the warm-up: samples over the sum of their times, so a slow step counts in full."""
    algorithm = load_config(case.config, overrides).config.algorithm
    samples = algorithm.prompts_per_step * algorithm.group_size
    rows = [row for row in history if row["step"] > case.warmup and "time/step" in row]
    if not rows:
        raise RuntimeError(f"no step after the warm-up of {case.warmup}")
    seconds = fmean(row["time/step"] for row in rows)
    split = {word: fmean(row.get(name, 0.0) for row in rows) for name, word in SPLIT}
    return {"samples_per_step": samples, "steps_measured": len(rows), "seconds_per_step": seconds,
            "samples_per_s": samples / seconds, "step_seconds": [round(row["time/step"], 4) for row in rows],
            "split_s": split, "other_share": split["other"] / seconds,
            "length_mean": fmean(row["response/length_mean"] for row in rows),
            "reward_first": history[0]["reward/mean"], "reward_last": history[-1]["reward/mean"]}


def baseline(case: Case, out: Path, arguments: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "benchmarks.trl_baseline", case.config, *arguments.overrides,
               "--packages", str(arguments.trl_packages), "--steps", str(case.trl_steps),
               "--warmup", str(case.warmup), "--out", str(out)]
    run_logged(command, timeout_s=arguments.timeout, log=out.with_suffix(".log"))
    return json.loads(out.read_text(encoding="utf-8"))


def machine() -> dict:
    model = next((line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def markdown(document: dict) -> str:
    """Two tables: the rates of both sides with the target, and the parts of our step."""
    lines = [f"{document['machine']['cpu']}, {document['machine']['cores']} cores.", "",
             "| configuration | samples per step | megatron-rl, samples/s | TRL, samples/s | ratio | "
             f"target: {AIM:g} x | tokens per completion, ours / TRL |",
             "|---|---|---|---|---|---|---|"]
    for name, case in document["cases"].items():
        ours, trl = case["ours"], case["trl"]
        lines.append(f"| {name} | {ours['samples_per_step']} | {ours['samples_per_s']:.2f} | "
                     f"{trl['samples_per_s']:.2f} | {case['ratio']:.2f} | "
                     f"{'met' if case['ratio'] >= AIM else 'missed'} | "
                     f"{ours['length_mean']:.1f} / {trl['length_mean']:.1f} |")
    words = [word for _, word in SPLIT]
    lines += ["", f"| configuration | step, s | {' | '.join(words)} |", "|---|---|" + "---|" * len(words)]
    for name, case in document["cases"].items():
        ours = case["ours"]
        parts = " | ".join(f"{ours['split_s'][word]:.2f} s ({ours['split_s'][word] / ours['seconds_per_step']:.1%})"
                           for word in words)
        lines.append(f"| {name} | {ours['seconds_per_step']:.2f} | {parts} |")
    for name, case in document["cases"].items():
        whole = case["ours"]["samples_per_step"] / case["trl"]["samples_per_s"]
        rollout = case["ours"]["split_s"]["rollout"]
        if case["ratio"] < AIM and rollout * AIM > whole:
            lines += ["", f"{name}: TRL's whole step takes {whole:.3f} s, and generation alone takes {rollout:.3f} s "
                      "here, mostly for requests to an engine, which outweigh the model at this size. The target "
                      "cannot be reached with an engine in a process of its own."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
