"""The built-in rewards: right forms of right answers score, everything that only looks right does not."""

from __future__ import annotations

import re
import time
from decimal import Decimal

import pytest

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards.final_answer import THINKING, after_thinking, boxes
from megatron_rl.rewards.functions import exact_match, format_match, math_equivalence, overlong_penalty
from megatron_rl.rewards.guards import check_guards, guard_cases
from megatron_rl.rewards.load import load_rewards
from megatron_rl.rewards.numbers import last_number, marked_number, parse_number
from tests.patience import patient


@pytest.mark.parametrize("completion, answer", [
    ("48/2 = 24, 48+24 = <<48+24=72>>72\n#### 72", "72"),
    ("#### 72", "so <<6*12=72>>72\n#### 72"),
    ("####72", "72"), ("#### 72.", "72"), ("#### 72.00\n", "72"), ("#### +72", "72"), ("#### $72", "72"),
    ("#### 72 apples", "72"), ("#### 1,234,567", "1234567"), ("#### 1234567", "1,234,567"),
    ("#### -5", "-5"), ("#### \u22125", "-5"), ("#### -$5.50", "-5.5"), ("#### $-5.50", "-5.5"), ("#### .5", "0.5"),
    ("#### 0", "0"), ("#### 007", "7"), ("#### 72\nand so on", "72"), ("#### 72\n#### 72.0", "72"),
    ("#### 12345678901234567890", "12345678901234567890"),
])
def test_gsm8k_answers_that_are_right(completion, answer):
    assert exact_match(completion, answer) == 1.0


@pytest.mark.parametrize("completion, answer", [
    ("72", "72"), ("", "72"), ("####", "72"), ("#### ", "72"), ("### 72", "72"), ("#### 7", "72"), ("#### 727", "72"),
    ("#### -72", "72"), ("#### 72.1", "72"), ("#### 71 or 72", "72"), ("#### 71\n#### 72", "72"),
    ("#### 72\n#### 71", "72"), ("#### 72/5", "72"), ("#### 72e3", "72"), ("#### 1,23", "123"),
    ("#### 1,2345", "12345"),
    ("#### 71 #### 72", "72"), ("#### 1.2.3", "1.2"), ("#### seventy-two", "72"), ("####\n72", "72"),
    ("#### 12345678901234567891", "12345678901234567890"), ("#### 72\n####", "72"),
])
def test_gsm8k_answers_that_are_wrong_or_cheat(completion, answer):
    assert exact_match(completion, answer) == 0.0


@pytest.mark.parametrize("anywhere", ["marker", "last_number", "text"])
@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_an_empty_gold_answer_is_an_error(anywhere, answer):
    for completion in ("", "None", "#### 0", "#### "):
        with pytest.raises(ValueError, match="gold answer is empty"):
            exact_match(completion, answer, anywhere=anywhere)


@pytest.mark.parametrize("answer", ["many", "1 or 2", "#### many", "####"])
def test_a_gold_answer_without_a_number_is_an_error(answer):
    with pytest.raises(ValueError, match="gold answer"):
        exact_match(f"#### {answer}", answer)


@pytest.mark.parametrize("text, value", [
    ("It is 72.", "72"), ("3+4=7", "7"), ("10 - 3 = 7 apples", "7"), ("x=-7", "-7"), ("**72**", "72"),
    ("$1,200!", "1200"),
    ("first 5, then 6", "6"), ("1/2", None), ("3,4,5", None), ("none", None), ("1e5", None), ("5-3", None),
    ("", None),
])
def test_last_number(text, value):
    assert last_number(text) == (None if value is None else Decimal(value))


def test_numbers_alone():
    assert parse_number(" -1,234.50 ") == Decimal("-1234.5")
    assert parse_number("72 apples") is None and parse_number("1,23") is None
    assert marked_number("no marker 5") is None


def test_text_mode_compares_text():
    assert exact_match(" Paris\n", "Paris", anywhere="text") == 1.0
    assert exact_match("paris", "Paris", anywhere="text") == 0.0
    assert exact_match("72.0", "72", anywhere="text") == 0.0


HALVES = ["1/2", "0.5", "\\frac{1}{2}", "\\frac12", ".5", "\\dfrac{2}{4}", "50\\%"]


@pytest.mark.parametrize("answer", HALVES)
def test_all_ways_to_write_a_half_are_equal(answer):
    for found in HALVES:
        assert math_equivalence(f"So \\boxed{{{found}}}.", answer) == 1.0, found
        assert math_equivalence(f"So \\boxed{{{found}}}.", "1/3") == 0.0, found


@pytest.mark.parametrize("completion, answer, value", [
    ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0), ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1.0), ("\\boxed{x=5}", "5", 1.0),
    ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1.0), ("\\boxed{(2,1)}", "(1,2)", 0.0), ("\\boxed{3,000}", "3000", 1.0),
    ("\\boxed{72}", "long derivation, $\\boxed{72}$", 1.0),
    ("\\boxed{\\frac{\\sqrt{3}}{2}}", "$\\frac{\\sqrt{3}}{2}$", 1.0),
    ("\\boxed{0.333}", "1/3", 0.0), ("\\boxed{5}", "\\boxed{6}", 0.0),
    ("\\boxed{4} \\boxed{5}", "5", 1.0), ("\\boxed{5} \\boxed{4}", "5", 0.0), ("\\boxed{4, 5}", "5", 0.0),
    ("\\boxed{5} \\boxed{" + "9" * 501 + "}", "5", 0.0), ("\\boxed{" + "9" * 501 + "} \\boxed{5}", "5", 1.0),
    ("\\boxed{5} \\boxed{5", "5", 0.0), ("\\boxed{ is LaTeX. \\boxed{5}", "5", 1.0),
    ("\\boxed {5}", "5", 1.0), ("\\\\boxed{5}", "5", 1.0), ("\\fbox{5}", "5", 1.0), ("\\unboxed{5}", "5", 0.0),
    ("\\boxed{\\boxed{5}}", "5", 1.0), ("\\boxed{\\left\\{1,2\\right\\}}", "\\{1,2\\}", 1.0),
    ("\\boxed{4 \\text{ or } 5}", "5", 0.0), ("\\boxed{[0, 10]}", "5", 0.0), ("\\boxed{\\pm 5}", "5", 0.0),
    ("\\boxed{5.}", "5", 1.0), ("\\boxed{5.}", "5.", 1.0), ("\\boxed{0.5.}", ".5", 1.0), ("\\boxed{5.5}", "5.", 0.0),
    ("\\boxed{.}", "5", 0.0), ("\\boxed{5..}", "5", 0.0),
    ("\\boxed{}", "5", 0.0), ("5", "5", 0.0), ("\\boxed{5", "5", 0.0), ("", "5", 0.0), ("\\boxed{x}", "5", 0.0),
    ("\\boxed{" + "(" * 300 + "5" + ")" * 300 + "}", "5", 0.0), ("\\boxed{4 | 5}", "5", 0.0),
    ("Is it 4 or 5?", "5", 0.0), ("\\boxed{Is it 4 or 5?}", "5", 0.0),
])
def test_math(completion, answer, value):
    assert math_equivalence(completion, answer) == value


@pytest.mark.parametrize("answer", [None, "", "  ", "???", "\\frac{", "\\boxed{}"])
def test_a_gold_answer_that_cannot_be_parsed_never_scores(answer):
    """open-r1#55: reward 1 was given whenever the gold answer failed to parse."""
    for completion in ("", "\\boxed{}", "\\boxed{5}", f"\\boxed{{{answer}}}"):
        with pytest.raises(ValueError, match="cannot be parsed"):
            math_equivalence(completion, answer)


@pytest.mark.parametrize("completion, value", [
    ("\\boxed{5} \\boxed{5.0}", 1.0), ("\\boxed{4} \\boxed{5}", 0.0), ("\\boxed{5} \\boxed{4}", 0.0),
    ("\\boxed{5} \\boxed{5", 0.0), ("", 0.0), ("\\boxed{4}</think>\\boxed{5}", 1.0)])
def test_all_boxes_must_be_right_if_asked(completion, value):
    assert math_equivalence(completion, "5", boxed="all") == value


# What a policy of Qwen3 or DeepSeek-R1 writes: their templates leave the thinking to it, or begin or end it in the
# prompt (`enable_thinking=False`).
QWEN3, R1, NO_THINKING = "<|im_start|>assistant\n", "<｜Assistant｜><think>\n", "assistant\n<think>\n\n</think>\n\n"
THOUGHTS = [
    (QWEN3, "<think>\nIs it @4@?\n</think>\n\n@5@", 1.0), (QWEN3, "<think>\n@5@\n</think>\n\n@4@", 0.0),
    (QWEN3, "<think>\n@5@\n</think>\n\n", 0.0), (QWEN3, "<think>\nIs it @5@?", 0.0), (QWEN3, "@5@", 1.0),
    (QWEN3, "<think>@4@</think>@4@<think>@4@</think>@5@", 1.0), (QWEN3, "<think>a</think>@5@<think>b", 0.0),
    (R1, "Is it @4@?\n</think>\n\n@5@", 1.0), (R1, "It is @5@", 0.0), (R1, "@5@\n</think>\n\n", 0.0),
    (R1, "<think>@4@</think>@5@", 1.0),
    (NO_THINKING, "@5@", 1.0), (NO_THINKING, "@4@", 0.0),
    ("Think between <think> and </think>.", "@5@", 1.0), ("Begin with <think>!\nassistant: ", "@5@", 1.0)]
FORMS = [(math_equivalence, {}, "\\boxed{%s}"), (math_equivalence, {"boxed": "all"}, "\\boxed{%s}"),
         (math_equivalence, {"anywhere": "last"}, "$%s$"), (exact_match, {}, "#### %s\n"),
         (exact_match, {"anywhere": "last_number"}, "%s "), (exact_match, {"anywhere": "text"}, "%s")]


@pytest.mark.parametrize("function, args, form", FORMS, ids=lambda value: str(value).split()[1:2] or str(value))
@pytest.mark.parametrize("prompt, completion, value", THOUGHTS)
def test_an_answer_comes_after_the_thinking(function, args, form, prompt, completion, value):
    def written(text: str) -> str:
        return re.sub("@(.)@", lambda found: form % found[1], text)

    assert function(written(completion), "5", prompt=prompt, **args) == value
    tags = {"<think>": "[THINK]", "</think>": "[/THINK]"}
    other = [re.sub("</?think>", lambda found: tags[found[0]], text) for text in (prompt, completion)]
    assert function(written(other[1]), "5", prompt=other[0], thinking=list(tags.values()), **args) == value


def test_without_tags_everything_is_looked_at():
    for completion, value in (("<think>\\boxed{5}", 1.0), ("\\boxed{4}</think>\\boxed{5}", 0.0)):
        assert math_equivalence(completion, "5", prompt=R1, boxed="all", thinking=None) == value


@pytest.mark.parametrize("text, contents", [
    ("", []), ("no box", []), ("\\boxed{}", [""]), ("\\boxed{a}b\\boxed{ c }", ["a", "c"]), ("}\\boxed{a}}", ["a"]),
    ("{\\boxed{a}", ["a"]), ("\\boxed{\\frac{1}{2}}", ["\\frac{1}{2}"]), ("\\boxed{a\\boxed{b}c}", ["a\\boxed{b}c"]),
    ("\\boxed{a\\}b}", ["a\\}b"]), ("\\boxed{\\left\\{ 1 \\right.}", ["\\left\\{ 1 \\right."]), ("\\boxed{a", [""]),
    ("\\boxed{a}\\boxed{b", ["a", ""]), ("\\boxed{a \\boxed{b}", ["b"]), ("\\boxed{a\\boxed{b", [""]),
    ("\\boxed{a}\\boxed{\\boxed{b}", ["a", "b"])])
def test_boxes(text, contents):
    assert boxes(text) == contents


@pytest.mark.parametrize("unit", ["\\boxed{", "\\", "{", "\\boxed", "\\boxed ", "\\boxed{}", "<think>", "</think>"])
def test_no_text_takes_long(unit):
    """A million characters, which take hours if the time grows with the square of the length."""
    began = time.monotonic()
    boxes(after_thinking(unit * (1_000_000 // len(unit)), "", THINKING))
    assert time.monotonic() - began < patient(5)


def test_math_last_expression():
    assert math_equivalence("the answer is 0.5", "1/2", anywhere="last") == 1.0
    assert math_equivalence("the answer is 0.25", "1/2", anywhere="last") == 0.0


def test_format_is_a_full_match():
    pattern = r"(?s)<think>.*</think>\s*#### -?\d+"
    assert format_match("<think>a\nb</think>\n#### 5", None, pattern=pattern) == 1.0
    assert format_match("<think>a</think>\n#### 5 or so", None, pattern=pattern) == 0.0
    assert format_match("x <think>a</think>\n#### 5", None, pattern=pattern) == 0.0


def test_overlong_penalty_is_daps_piecewise_line():
    expected = {0: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0, 101: -1.0, 900: -1.0}
    for tokens, value in expected.items():
        assert overlong_penalty("", None, completion_tokens=tokens, max_tokens=100, buffer_tokens=20) == value


GUARDED = [{"function": "exact_match"}, {"function": "exact_match", "args": {"anywhere": "last_number"}},
           {"function": "exact_match", "args": {"anywhere": "text"}}, {"function": "math"},
           {"function": "math", "args": {"anywhere": "last"}}, {"function": "math", "args": {"boxed": "all"}},
           {"function": "math", "args": {"thinking": None}},
           *({"function": name, "args": {"thinking": ["[T]", "[/T]"]}} for name in ("math", "exact_match")),
           {"function": "length", "args": {"max_tokens": 20, "buffer_tokens": 5}}]


@pytest.mark.parametrize("entry", GUARDED)
def test_guards_pass_and_cover_every_verdict(entry):
    rewards = load_rewards(RewardConfig.model_validate({"functions": [entry]}))
    verdicts = {case.verdict for case in guard_cases(rewards[0])}
    assert {"wrong", "cheat"} <= verdicts
    assert entry["function"] == "length" or verdicts == {"right", "wrong", "cheat", "refused"}
    check_guards(rewards)


@pytest.mark.parametrize("broken, why", [
    (lambda completion, answer, **_: 1.0, "wrong|cheat"),
    (lambda completion, answer, **_: 0.0, "right"),
    (lambda completion, answer, **_: float((answer or "-").split()[-1] in completion.replace(",", "")), "wrong|cheat"),
    (lambda completion, answer, **_: float((answer or "").strip()[-2:] == completion[-2:]), "right|cheat|refused"),
])
def test_guards_catch_a_broken_grader(monkeypatch, broken, why):
    """What a changed dependency could do to a built-in: always right, never right, substring, last characters."""
    broken.__name__ = "exact_match"
    (reward,) = load_rewards(RewardConfig.model_validate({"functions": [{"function": "exact_match"}]}))
    monkeypatch.setitem(reward.__dict__, "function", broken)
    with pytest.raises(UserError, match=f"fails its guard \\(({why})"):
        check_guards([reward])
