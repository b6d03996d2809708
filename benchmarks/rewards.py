"""`make bench-rewards`: measures the CPU seconds of a reward process for a completion, for the built-in rewards.

The completions are as long as in configs/70b/grpo.yaml and end with an answer of the kinds that the MATH data set has.
Half of them are right, written in one of two ways, and the others give a few wrong answers. Every prompt has numbers of
its own, so that SymPy's caches help within a group only, as in a run. `alone` has one completion per prompt, and no
such help. The `short` completions have no prose. What counts is the CPU time of a real reward process, so other load on
the machine hardly matters.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence

import psutil

from launch.config.schema import Reward
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.sample import Sample

GROUP, COMPLETIONS = 16, 768
SHORT = 10_000
WARM_UP = 16
"""Completions that are not counted."""
PROSE = ("Let us go step by step. We have $x^2 + 3x = 10$, so $x = 2$ or $x = -5$. Substituting into the second "
         "equation gives $\\frac{a}{b} = \\sqrt{2}$, which is positive.\n")
CHARACTERS = 8192
"""Of a completion of 2,048 tokens."""
Pair = tuple[str, str]
"""An answer, and the same one in another form."""

KINDS: Sequence[Callable[[int, int], Pair]] = (
    lambda a, b: (f"{a}", f"{a}.0"),
    lambda a, b: (f"{a}", f"{a}"),
    lambda a, b: (f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
    lambda a, b: (f"-\\frac{{{a}}}{{{b}}}", f"-\\dfrac{{{a}}}{{{b}}}"),
    lambda a, b: (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}"),
    lambda a, b: (f"({a}, \\frac{{\\pi}}{{{b}}})", f"\\left({a},\\frac{{\\pi}}{{{b}}}\\right)"),
    lambda a, b: (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})"),
    lambda a, b: (f"[{a},\\infty)", f"[{a}, \\infty)"),
    lambda a, b: (f"x \\in [-{a},{b}]", f"[-{a},{b}]"),
    lambda a, b: (f"\\begin{{pmatrix}}{a}&2\\\\3&{b}\\end{{pmatrix}}",
                  f"\\begin{{pmatrix}} {a} & 2 \\\\ 3 & {b} \\end{{pmatrix}}"),
    lambda a, b: (f"\\{{{a},{b},-1\\}}", f"\\{{-1,{b},{a}\\}}"),
    lambda a, b: (f"{a} - {b}i", f"{a}-{b}i"),
    lambda a, b: (f"{a}^\\circ", f"{a}"),
    lambda a, b: (f"\\frac{{1}}{{{a}}}\\ln {b}+\\frac{{\\pi}}{{4}}", f"\\frac{{\\pi}}{{4}}+\\frac{{\\ln {b}}}{{{a}}}"),
    lambda a, b: (f"e^{{{a}x}}\\sin x", f"\\sin(x) e^{{{a}x}}"),
    lambda a, b: (f"{a}x^3-{b}x^2+10x-4", f"-4+10x-{b}x^2+{a}x^3"),
)


def samples(rng: random.Random, size: int) -> list[Sample]:
    """Completions with boxed answers, in groups of this size."""
    found = []
    for group in range(COMPLETIONS // size):
        kind, a, b = KINDS[group % len(KINDS)], rng.randint(2, 99), rng.randint(2, 99)
        gold, other = kind(a, b)
        wrong = [kind(a + 1, b)[0], kind(b, a)[1], kind(a, b + 2)[0]]
        for index in range(size):
            answer = rng.choice([gold, other] if rng.random() < 0.5 else wrong)
            prose = (PROSE * (CHARACTERS // len(PROSE) + 1))[:CHARACTERS]
            found.append(Sample(f"{prose}\nSo the answer is $\\boxed{{{answer}}}$.", gold, prompt_index=group,
                                sample_index=index, completion_tokens=CHARACTERS // 4))
    return found


def cpu_seconds(function: dict, work: Sequence[Sample]) -> tuple[float, list[float]]:
    """(CPU seconds of a reward process per completion, seconds of each)."""
    config = Reward.model_validate({"functions": [function], "workers": 1, "timeout_s": 60.0})
    with RewardPool(config) as pool:
        pool.score(work[:WARM_UP])      # imports and guards are behind it
        process = next(child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline()))
        before = process.cpu_times()
        scores = pool.score(work[WARM_UP:])
        after = process.cpu_times()
    if bad := [score for score in scores if score.status != "ok"]:
        raise SystemExit(f"{function['function']}: {len(bad)} completions failed, the first with {bad[0].detail}")
    cpu = after.user + after.system - before.user - before.system
    return cpu / len(scores), [score.seconds for score in scores]


def main() -> int:
    """Print a table."""
    work, alone = samples(random.Random(0), GROUP), samples(random.Random(0), 1)
    numbers = [Sample(each.completion, f"#### {each.prompt_index}", prompt_index=each.prompt_index,
                      completion_tokens=each.completion_tokens) for each in work]
    short = [Sample(f"{index} + 3 = {index + 3}", f"{index + 3}", prompt_index=index) for index in range(SHORT)]
    print(f"{COMPLETIONS - WARM_UP} completions of {CHARACTERS:,} characters, one reward process")
    print(f"{'reward':14}{'CPU s each':>12}{'median s':>11}{'9 of 10 below':>15}{'longest s':>11}")
    exact = {"function": "exact_match", "args": {"anywhere": "last_number"}}
    for name, function, given in (
            ("math", {"function": "math"}, work), ("math, alone", {"function": "math"}, alone),
            ("exact_match", exact, numbers), ("exact, short", exact, short),
            ("format", {"function": "format", "args": {"pattern": "(?s).*boxed.*"}}, work)):
        cpu, each = cpu_seconds(function, given)
        print(f"{name:14}{cpu:>12.5f}{statistics.median(each):>11.5f}"
              f"{statistics.quantiles(each, n=10)[-1]:>15.5f}{max(each):>11.5f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
