r"""What of a completion is the answer: the text after the thinking, and the contents of its boxes.

Both are one pass over the text, because a policy writes whatever takes the grader longest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

Tags = Annotated[Sequence[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)] | None
"""The beginning and the end of a thinking block; None: there is none."""
THINKING: Tags = ("<think>", "</think>")
_BRACE = re.compile(r"(?P<box>(?<!\\)\\+(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
r"""A box, an escaped character (`\{` is no group), or a brace. Some policies escape the backslash of a box, too."""


def after_thinking(completion: str, prompt: str, tags: Tags) -> str:
    """The part of a completion after its last thinking block, or all of it if it has none. Empty while the policy is
    still thinking: a block that it began, or that the end of the prompt began, has no end."""
    if tags is None:
        return completion
    begin, end = tags
    _, ended, rest = completion.rpartition(end)
    thinks = begin in rest or (not ended and prompt.rstrip().endswith(begin))
    return "" if thinks else rest


def boxes(text: str) -> list[str]:
    r"""The contents of the outermost `\boxed{...}` (or `\fbox{...}`) in a text, with balanced braces. If the last one
    has no end, because the completion was cut off, its content is the empty text."""
    closed: list[tuple[int, int]] = []
    opened: list[int | None] = []
    for brace in _BRACE.finditer(text):
        if brace["box"]:
            opened.append(brace.end())
        elif brace.group() == "{":
            opened.append(None)
        elif brace.group() == "}" and opened and (begin := opened.pop()) is not None:
            while closed and closed[-1][0] > begin:
                closed.pop()
            closed.append((begin, brace.start()))
    contents = [text[begin:end].strip() for begin, end in closed]
    last = closed[-1][1] if closed else -1
    return [*contents, ""] if any(begin is not None and begin > last for begin in opened) else contents
