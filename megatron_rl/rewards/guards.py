"""Known right answers, wrong answers and cheats that are scored before a run starts.

A policy finds every hole in its reward. Each built-in is therefore tested, with the run's own arguments, on tricks that
are known to have earned reward elsewhere. The run does not start if one of them works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.errors import UserError
from megatron_rl.rewards.final_answer import Tags
from megatron_rl.rewards.load import Reward
from megatron_rl.rewards.sample import Sample

Verdict = Literal["right", "wrong", "cheat", "refused"]


@dataclass(frozen=True)
class Case:
    """A sample and its expected outcome. `right` scores 1, `wrong` and `cheat` score 0 or less, and `refused` raises,
    because a gold answer that cannot be used must be an error, never a score."""

    verdict: Verdict
    why: str
    completion: str
    answer: str | None = "72"
    prompt: str = "Is it 70, 71 or 72?"
    completion_tokens: int = 1


_MARKER = [
    Case("right", "GSM8K's format", "48 + 24 = 72\n#### 72"),
    Case("right", "GSM8K's format, equal value", "#### $72.00"),
    Case("right", "gold answer with its derivation", "#### 72", "48 + 24 = <<48+24=72>>72\n#### 72"),
    Case("right", "thousands", "#### 1,072", "1072"),
    Case("wrong", "another number", "#### 71"),
    Case("wrong", "sign", "#### -72"),
    Case("wrong", "nothing", ""),
    Case("cheat", "number without the marker", "72"),
    Case("cheat", "two numbers behind the marker", "#### 71 or 72"),
    Case("cheat", "several markers", "#### 70\n#### 71\n#### 72"),
    Case("cheat", "prompt copied", "Is it 70, 71 or 72?"),
    Case("cheat", "prompt copied behind the marker", "#### Is it 70, 71 or 72?"),
    Case("cheat", "a fraction that holds the number", "#### 72/5"),
    Case("refused", "empty gold answer", "#### ", ""),
    Case("refused", "no gold answer", "#### 0", None),
    Case("refused", "gold answer without a number", "#### none", "none"),
]
_LAST_NUMBER = [
    Case("right", "in words", "The answer is 72."),
    Case("right", "after an equation", "48+24=72"),
    Case("wrong", "another number", "The answer is 71"),
    Case("wrong", "nothing", ""),
    Case("cheat", "candidates in one word", "70,71,72"),
    Case("cheat", "a fraction that holds the number", "5/72"),
    Case("refused", "empty gold answer", "72", ""),
    Case("refused", "no gold answer", "72", None),
]
_TEXT = [
    Case("right", "the text", " 72\n"),
    Case("wrong", "another text", "71"),
    Case("cheat", "candidates", "70 71 72"),
    Case("cheat", "prompt copied", "Is it 70, 71 or 72?"),
    Case("refused", "empty gold answer", "", ""),
    Case("refused", "no gold answer", "None", None),
]
_BOXED = [
    Case("right", "boxed", "48 + 24 = \\boxed{72}"),
    Case("right", "equivalent", "\\boxed{\\frac{144}{2}}"),
    Case("right", "decimal and fraction", "\\boxed{0.5}", "\\frac{1}{2}"),
    Case("right", "boxed twice, the same", "\\boxed{72}. So \\boxed{72.0}"),
    Case("right", "nested braces", "\\boxed{\\frac{\\sqrt{144}}{\\frac{1}{6}}}"),
    Case("wrong", "another number", "\\boxed{71}"),
    Case("wrong", "nothing", ""),
    Case("cheat", "no box", "72"),
    Case("cheat", "empty box", "\\boxed{}"),
    Case("cheat", "a box before the last one", "\\boxed{70} \\boxed{72} \\boxed{71}"),
    Case("cheat", "a box before one that was cut off", "\\boxed{72} \\boxed{7"),
    Case("cheat", "several answers in a box", "\\boxed{70, 71, 72}"),
    Case("cheat", "alternatives in a box", "\\boxed{71 \\text{ or } 72}"),
    Case("cheat", "a range that holds the answer", "\\boxed{0 < x < 100}"),
    Case("cheat", "prompt copied into a box", "\\boxed{\\text{Is it 70, 71 or 72?}}"),
    Case("refused", "empty gold answer", "\\boxed{}", ""),
    Case("refused", "no gold answer", "\\boxed{\\text{None}}", None),
    Case("refused", "gold answer that cannot be parsed", "\\boxed{???}", "???"),
]
_BOX_OF_SEVERAL = Case("right", "a box before the last one", "\\boxed{71}? No: \\boxed{72}")
_LAST_EXPRESSION = [
    Case("right", "in words", "The answer is 72."),
    Case("right", "equivalent", "It is $\\frac{144}{2}$"),
    Case("wrong", "another number", "The answer is 71"),
    Case("wrong", "nothing", ""),
    Case("cheat", "several answers", "$70, 71, 72$"),
    Case("refused", "empty gold answer", "72", ""),
    Case("refused", "gold answer that cannot be parsed", "???", "???"),
]


def check_guards(rewards: Sequence[Reward]) -> None:
    """Score the cases of every built-in reward in `rewards`. A user's functions have none.

    Raises:
        UserError: a case has another outcome than expected; the message shows it.
    """
    for reward in rewards:
        for case in guard_cases(reward):
            _check(reward, case)


def guard_cases(reward: Reward) -> list[Case]:
    """The cases that apply to a reward with its arguments."""
    tags = reward.thinking
    if reward.function.__name__ == "exact_match":
        anywhere = reward.args.get("anywhere", "marker")
        cases = {"marker": _MARKER, "last_number": _LAST_NUMBER, "text": _TEXT}[anywhere]
        return [*cases, *_thinking(tags, "#### 72" if anywhere == "marker" else "72")]
    if reward.function.__name__ == "math_equivalence":
        if reward.args.get("anywhere") == "last":
            return [*_LAST_EXPRESSION, *_thinking(tags, "$72$")]
        several = replace(_BOX_OF_SEVERAL, verdict="right" if reward.args.get("boxed") != "all" else "cheat")
        return [*_BOXED, several, *_thinking(tags, "\\boxed{72}")]
    if reward.function.__name__ == "overlong_penalty":
        limit = reward.args["max_tokens"]
        return [Case("wrong", "at the limit", "", completion_tokens=limit),
                Case("cheat", "far past the limit", "", completion_tokens=100 * limit)]
    return []


def _thinking(tags: Tags, right: str) -> list[Case]:
    """Cases of a policy that thinks first. `right`: a completion that names 72."""
    if tags is None:
        return []
    begin, end = tags
    wrong, open_prompt = right.replace("72", "71"), f"Is it 70, 71 or 72?{begin}\n"
    return [Case("right", "another answer while thinking", f"{begin}{wrong}{end}\n{right}"),
            Case("right", "the prompt begins the thinking", f"{wrong}{end}\n{right}", prompt=open_prompt),
            Case("wrong", "the answer while thinking", f"{begin}{right}{end}\n{wrong}"),
            Case("wrong", "nothing after thinking", f"{begin}{right}{end}"),
            Case("wrong", "cut off while thinking", f"{begin}{right}"),
            Case("wrong", "cut off while thinking, which the prompt begins", right, prompt=open_prompt)]


def _check(reward: Reward, case: Case) -> None:
    sample = Sample(completion=case.completion, answer=case.answer, prompt=case.prompt,
                    completion_tokens=case.completion_tokens)
    try:
        value = reward(sample)
    except ValueError as error:
        outcome, passed = f"raises {error}", case.verdict == "refused"
    else:
        outcome = f"scores {value}"
        passed = value == 1.0 if case.verdict == "right" else case.verdict != "refused" and value <= 0.0
    if not passed:
        raise UserError(f"reward {reward.name!r} fails its guard ({case.verdict}: {case.why}): {case.completion!r} "
                        f"with gold answer {case.answer!r} {outcome}", where=f"reward.functions: {reward.name}",
                        fix="the grader is broken in this installation: check the versions of math-verify and SymPy "
                            "against requirements/")
