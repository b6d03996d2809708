"""What becomes of prompts that are longer than `rollout.max_prompt_tokens` (`data.overlong`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from launch.errors import UserError
from megatron_rl.data.batch import Prompt

Rule = Literal["refuse", "drop", "truncate_left"]
EFFECTS = {"drop": "they are left out", "truncate_left": "only their last tokens are kept"}


@dataclass(frozen=True)
class Overlong:
    """The prompts of a data set that exceed the limit; there is at least one."""

    rule: Rule
    limit: int
    count: int
    of: int
    """Number of all prompts."""
    longest: int
    """Row of the longest prompt."""
    tokens: int
    """Its length."""

    def __str__(self) -> str:
        return (f"{self.count} of {self.of} prompts are longer than rollout.max_prompt_tokens = {self.limit}; the "
                f"longest, row {self.longest}, has {self.tokens} tokens")

    @property
    def identity(self) -> str:
        """What a resumed run must share."""
        return f"{self.rule} above {self.limit} tokens"


def fitted(prompts: Sequence[Prompt], limit: int, rule: Rule, where: str,
           text_of: Callable[[np.ndarray], str]) -> tuple[list[Prompt], Overlong | None]:
    """The prompts with at most `limit` tokens each, and those that were longer.

    `drop` closes the gaps in `Prompt.index`. `truncate_left` keeps the last `limit` tokens, whatever they are. The text
    is then what is left of it.

    Args:
        where: the file, for messages.
        text_of: the text of ids.
    Raises:
        UserError: `refuse` and a prompt is too long, or `drop` and all are.
    """
    lengths = [len(prompt.token_ids) for prompt in prompts]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] <= limit:
        return list(prompts), None
    found = Overlong(rule, limit, sum(length > limit for length in lengths), len(prompts), prompts[longest].row,
                     lengths[longest])
    where = f"{where}; rollout.max_prompt_tokens"
    if rule == "refuse":
        raise UserError(str(found), where=where,
                        fix=f"set rollout.max_prompt_tokens={lengths[longest]} or more, remove these rows, or set "
                            "data.overlong to drop or truncate_left")
    if rule == "truncate_left":
        return [_truncated(prompt, limit, text_of) for prompt in prompts], found
    kept = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
    if not kept:
        raise UserError(f"all {len(prompts)} prompts are longer than rollout.max_prompt_tokens = {limit}, and "
                        "data.overlong = drop leaves none; the shortest has "
                        f"{min(lengths)} tokens", where=where,
                        fix=f"set rollout.max_prompt_tokens={min(lengths)} or more, or data.overlong=truncate_left")
    return [replace(prompt, index=index, dropped_before=prompt.row - index) for index, prompt in enumerate(kept)], found


def _truncated(prompt: Prompt, limit: int, text_of: Callable[[np.ndarray], str]) -> Prompt:
    if len(prompt.token_ids) <= limit:
        return prompt
    token_ids = prompt.token_ids[-limit:].copy()        # not a view, which would keep the whole prompt in memory
    return replace(prompt, token_ids=token_ids, text=text_of(token_ids))
