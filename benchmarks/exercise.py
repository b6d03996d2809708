"""`make exercise`: docs/exercise-70b.md, the planner's own answer to the reference exercise, and the plan shown in README.md.
No figure is typed by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch.plan.forecast import Forecast
from launch.planner.explain.forecast import throughput_of
from launch.planner.explain.remedies import with_nodes
from launch.planner.prepare import Prepared, prepare
from launch.planner.search.candidate import Candidate
from launch.planner.search.problem import Problem
from launch.planner.search.search import Search
from launch.planner.workload.lengths import LogNormal
from launch.report.plan.explain import explain
from launch.report.plan.table import print_plan

CONFIG = "configs/70b/grpo.yaml"
CAREFUL = ("algorithm.old_logprobs=recompute", "algorithm.kl.beta=0.001")
PAGE = Path("docs/exercise-70b.md")
README = Path("README.md")


def main() -> int:
    lean, careful = prepare(CONFIG), prepare(CONFIG, CAREFUL)
    PAGE.write_text(page(lean, careful), encoding="utf-8")
    README.write_text(with_picture(README.read_text(encoding="utf-8"), _terminal(lean)), encoding="utf-8")
    print(f"written to {PAGE} and to the plan in {README}")
    return 0


def with_picture(readme: str, output: str) -> str:
    """The page with the block between its marks replaced by a plan's output."""
    begin, end = "<!-- begin plan -->", "<!-- end plan -->"
    head, found, rest = readme.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"README.md needs a block {begin} ... {end}")
    indented = "".join(f"    {line}".rstrip() + "\n" for line in output.splitlines())
    return f"{head}{begin}\n{indented}{end}{tail}"


def page(lean: Prepared, careful: Prepared) -> str:
    """The whole document."""
    problem = lean.planned.found.problem
    sections = (
        "# The exercise: a 70B policy on 32 nodes x 8 H100\n\n"
        "Written by `make exercise`; every figure below is the planner's, and every one is predicted.\n",
        _question(problem), _answer(lean), _choices(lean), _why_training(lean), _careful(lean, careful),
        _doubts(lean))
    return "\n".join(sections)


def _question(problem: Problem) -> str:
    workload = problem.workload
    responses = workload.target * workload.group / 3600
    return f"""## What is asked

{workload.target:,.0f} prompts an hour, G = {workload.group}, prompts of {workload.prompt_tokens:,.0f} tokens, responses of
{workload.lengths.mean:,.0f} tokens on average and {workload.lengths.cap:,} at most. That is {workload.target / 3600:.2f}
prompts/s, {responses:.1f} responses/s, {responses * workload.lengths.mean / 1e3:.1f} thousand tokens generated and
{responses * workload.mean_tokens / 1e3:.1f} thousand tokens trained on each second.

    megatron-rl plan {CONFIG}
"""


def _answer(lean: Prepared) -> str:
    return f"## The answer\n\n```\n{_terminal(lean)}```\n"


def _choices(lean: Prepared) -> str:
    parts = ["## Every choice, and what rejected the others\n"]
    for choice in lean.plan.forecast.choices:
        parts.append(f"```\n{explain(lean.plan, choice.key).rstrip()}\n```\n")
    return "\n".join(parts)


def _why_training(lean: Prepared) -> str:
    found = lean.planned.found
    together = Search(replace(found.problem, asynchronous=False), "colocated").best()
    gpus = found.problem.cluster.gpus_per_node
    training = found.training.units * gpus * found.training.seconds
    rollout = found.rollout.units * gpus * found.rollout.seconds
    text = f"""## Why training takes {found.training.units} nodes and rollout {found.rollout.units}

Rollout usually takes several times as long as the update. In GPU-seconds of one step this plan spends
{training:,.0f} on training and {rollout:,.0f} on rollout, a ratio of {training / rollout:.2f}. Two things make the usual
ratio large, and both are absent here:

- **The tail.** A synchronous step waits for its longest completion while most sequences have ended. Asynchronous engines
  are refilled: they run {found.rollout.time.in_flight:,.0f} sequences all the time, and the cost of a token is that of a
  full batch ({found.rollout.time.tokens_per_s / found.rollout.layout.gpus:,.0f} tokens/s a GPU).
- **Small batches.** {found.problem.workload.sequences:,} responses a step keep the batch large enough that the weights are
  read once for many tokens.

What remains is arithmetic: an update costs three forward passes over prompt and response, a decoded token one.
"""
    if together is not None:
        text += f"""
Synchronous on the same nodes, all of them doing both in turn ({together.mode}), the step would be
{together.rollout.seconds:.0f} s of rollout and {together.training.seconds:.0f} s of training, a ratio of
{together.rollout.seconds / together.training.seconds:.1f}, and {together.prompts_per_hour:,.0f} prompts/h.
"""
    return text


def _careful(lean: Prepared, careful: Prepared) -> str:
    rows = [("lean: no log-prob pass, beta = 0", lean), ("careful: old log-probs recomputed, beta = 0.001", careful)]
    text = "## Both recipes\n\n| recipe | nodes | step, s | training phases, s | prompts/h | 10,000/h |\n"
    text += "|---|---|---|---|---|---|\n"
    for name, prepared in rows:
        forecast = prepared.plan.forecast
        text += (f"| {name} | {forecast.split.training} + {forecast.split.rollout} | {forecast.step_s:.1f} | "
                 f"{_phases(forecast)} | {_rate(forecast)} | {forecast.throughput.verdict} |\n")
    nodes = _smallest(careful.planned.found.problem)
    missing = "no cluster up to 128 nodes" if nodes is None else f"{nodes} nodes"
    return text + f"""
The careful recipe, which recomputes the old log-probs and keeps a reference for the KL term, reaches the target with
{missing}. `megatron-rl plan {CONFIG} {' '.join(CAREFUL)} --target 10000/h --sweep nodes=32..64`

The lean recipe is sound only as long as one optimizer step is made from a rollout batch (then the current policy is the
old one) and the engine's log-probs are corrected by truncated importance weights (`algorithm.importance_cap`): see
docs/old-logprobs.md.
"""


def _doubts(lean: Prepared) -> str:
    found, forecast = lean.planned.found, lean.plan.forecast
    rl = found.problem.coefficients.rl
    text = f"""## What is doubtful

- **Efficiency of RL training.** What RL keeps of the pre-training rate (eta) is taken as {rl.train_efficiency:g}; published
  runs scatter from {rl.train_efficiency_low:g} to {rl.train_efficiency_high:g}. With everything at its slow end the plan
  makes {forecast.throughput.low:,.0f}, at its fast end {forecast.throughput.high:,.0f} prompts/h.
- **The lengths.** sigma = 0.9 is an assumption. The best plan for other tails of the same mean:

| sigma | capped | nodes | prompts/h | versions old, at most |
|---|---|---|---|---|
"""
    for sigma in (0.6, 0.9, 1.1):
        best = _with_tail(found, sigma)
        text += (f"| {sigma:g} | {best.problem.workload.lengths.capped_share:.1%} | {best.training.units} + "
                 f"{best.rollout.units} | {best.prompts_per_hour:,.0f} | {best.staleness} |\n")
    text += "\nThe planner's own warnings:\n\n"
    return text + "".join(f"- {warning.code}: {warning.message}\n" for warning in forecast.warnings)


def _with_tail(found: Candidate, sigma: float) -> Candidate:
    lengths = found.problem.workload.lengths
    workload = replace(found.problem.workload, lengths=LogNormal(lengths.mean, sigma, lengths.cap))
    return Search(replace(found.problem, workload=workload)).best()


def _smallest(problem: Problem) -> int | None:
    """Fewest nodes, up to 128, whose best plan reaches the target nominally."""
    search = Search(replace(problem, cluster=with_nodes(problem.cluster, 128)))
    for nodes in range(len(problem.cluster.nodes), 129):
        best = search.best(nodes)
        if best is not None and throughput_of(best).nominal >= problem.workload.target:
            return nodes
    return None


def _phases(forecast: Forecast) -> str:
    names: Sequence[str] = ("logprob", "reference", "train")
    return " + ".join(f"{phase.name} {phase.seconds:.1f}" for phase in forecast.phases if phase.name in names)


def _rate(forecast: Forecast) -> str:
    each = forecast.throughput
    return f"{each.nominal:,.0f} ({each.low:,.0f} to {each.high:,.0f})"


def _terminal(prepared: Prepared) -> str:
    console = Console(width=100, file=io.StringIO(), color_system=None, highlight=False)
    print_plan(prepared, console)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
