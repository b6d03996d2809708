"""The built-in rewards. Each is `f(completion, answer, **keywords) -> float`, like a user's own function.

They are pure and have no deadlines: `pool` runs them in a worker process that it can end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_rl.rewards.final_answer import THINKING, Tags, after_thinking, boxes
from megatron_rl.rewards.numbers import last_number, marked_number, parse_number

LONGEST_BOX = 500
"""Maximum length of a boxed answer in characters: parsing time grows fast with nested brackets."""


def exact_match(completion: str, answer: str | None, *, prompt: str = "",
                anywhere: Literal["marker", "last_number", "text"] = "marker", thinking: Tags = THINKING) -> float:
    """1 if the completion's final answer equals the gold answer, otherwise 0.

    Args:
        anywhere: where to look for the answer. `marker`: after GSM8K's `####` (see `numbers.marked_number`);
            `last_number`: the last number in the completion; `text`: the whole completion, compared as text without
            surrounding white space. Numbers are compared exactly by value (`1,000` = `1000.0`).
        thinking: what lies between these tags is not looked at (see `after_thinking`).
    Raises:
        ValueError: the gold answer is empty, or has no number although one is compared. Such a row must not score.
    """
    if answer is None or not answer.strip():
        raise ValueError("the gold answer is empty")
    completion = after_thinking(completion, prompt, thinking)
    if anywhere == "text":
        return float(completion.strip() == answer.strip())
    gold = marked_number(answer) if "####" in answer else parse_number(answer)
    if gold is None:
        raise ValueError(f"the gold answer {answer!r} is neither a number nor ends in '#### <number>'")
    found = marked_number(completion) if anywhere == "marker" else last_number(completion)
    return float(found is not None and found == gold)


def math_equivalence(completion: str, answer: str | None, *, prompt: str = "",
                     anywhere: Literal["boxed", "last"] = "boxed", boxed: Literal["last", "all"] = "last",
                     thinking: Tags = THINKING) -> float:
    r"""1 if the completion's final answer is mathematically equal to the gold answer (math-verify), otherwise 0.

    Args:
        anywhere: `boxed`: only the content of `\boxed{...}` counts. `last`: the last expression that math-verify finds.
        boxed: the `last` box is the answer, or `all` boxes must be right.
        thinking: what lies between these tags is not looked at (see `after_thinking`).

    SymPy may never finish on a policy's output (`9^{9^{9^9}}`), which the pool ends as a timeout, so use
    `reward.on_error: zero`. Words are read as products of their letters, so use `exact_match` with `anywhere: text` for
    answers in words.

    Raises:
        ValueError: the gold answer is empty or cannot be parsed. Such a row must not score (open-r1#55).
    """
    gold = _parse_gold(answer or "")
    completion = after_thinking(completion, prompt, thinking)
    if anywhere == "last":
        return float(_equal(gold, _parse(completion)))
    found = boxes(completion)[-1 if boxed == "last" else 0:]
    if not found or max(map(len, found)) > LONGEST_BOX:
        return 0.0
    return float(all(_equal(gold, _parse_box(box)) for box in found))


def format_match(completion: str, answer: str | None, *, pattern: str) -> float:
    """1 if the whole completion matches the regular expression `pattern`, otherwise 0. Start it with `(?s)` to let `.`
    match line breaks."""
    return float(re.fullmatch(pattern, completion) is not None)


def overlong_penalty(completion: str, answer: str | None, *, completion_tokens: int,
                     max_tokens: Annotated[int, Field(gt=0)], buffer_tokens: Annotated[int, Field(gt=0)]) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, section 3.4), with n completion tokens:

        0                                             n <= max_tokens - buffer_tokens
        (max_tokens - buffer_tokens - n) / buffer_tokens    up to max_tokens
        -1                                            beyond
    """
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - completion_tokens) / buffer_tokens))


BUILTINS: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "math": math_equivalence,
    "format": format_match,
    "length": overlong_penalty,
}


@functools.lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> list[Any]:
    found = boxes(answer)
    content = found[-1] if found else answer.strip().strip("$").strip()
    parsed = _parse_box(content) if content else []
    if not parsed:
        raise ValueError(f"the gold answer {answer!r} cannot be parsed as mathematics")
    return parsed


def _parse(text: str) -> list[Any]:
    """SymPy expressions that math-verify finds in a text, without its fallback to a bare string, which would make any
    two texts that cannot be parsed equal."""
    import math_verify  # imported only on use: SymPy takes 0.4 s

    return math_verify.parse(text, fallback_mode="no_fallback", parsing_timeout=None)


def _parse_box(content: str) -> list[Any]:
    r"""The whole content as one expression. With math-verify's other extractors, `\boxed{Is it 4 or 5?}` would be 5,
    the last number in a text that is not an expression. A full stop at the end is that of the sentence."""
    from math_verify import LatexExtractionConfig, parse

    whole = LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=0)
    return parse(f"\\boxed{{{content.removesuffix('.')}}}", [whole], fallback_mode="no_fallback", parsing_timeout=None)


def _equal(gold: list[Any], found: list[Any]) -> bool:
    import math_verify

    # Its own timeout raises SIGALRM, which works only in a main thread and turns every answer into 0 elsewhere
    # (verl#5635, TRL#5281). The pool sets the deadline instead.
    return bool(found) and math_verify.verify(gold, found, timeout_seconds=None)
