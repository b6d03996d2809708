"""Rewards for tests: one that a user got wrong, one that holds a job at a step for as long as a test wants."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_rl.rewards.functions import exact_match


def raises(completion: str, answer: str | None) -> float:
    raise KeyError("no such column")


def held(completion: str, answer: str | None, *, gate: str) -> float:
    """`exact_match` of the last number. While there is a file `gate`, this process scores only as many completions as
    the file says (none if it is empty), and then waits."""
    global _scored
    while _closed(Path(gate)):
        time.sleep(0.1)
    _scored += 1
    return exact_match(completion, answer, anywhere="last_number")


_scored = 0


def _closed(gate: Path) -> bool:
    try:
        return _scored >= int(gate.read_text() or 0)
    except FileNotFoundError:
        return False


def letters(completion: str, answer: str | None, *, prompt: str) -> float:
    """A number from 0 to 1 that every letter changes, of the prompt too, so that a group has spread and no score fits
    another's completion. It teaches nothing."""
    value = 0
    for letter in f"{prompt}{completion}{answer}":
        value = (31 * value + ord(letter)) % 1009
    return value / 1008
