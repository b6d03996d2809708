"""Rewards for tests: one that a user got wrong, one that holds a job at a step for as long as a test wants."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_rl.rewards.functions import exact_match


def raises(completion: str, answer: str | None) -> float:
    raise KeyError("no such column")


def held(completion: str, answer: str | None, *, gate: str) -> float:
    """`exact_match` of the last number; it answers when there is no file `gate`."""
    while Path(gate).exists():
        time.sleep(0.1)
    return exact_match(completion, answer, anywhere="last_number")
