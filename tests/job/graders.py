"""Rewards for tests: one that a user got wrong, one that holds a job at a step for as long as a test wants."""

from __future__ import annotations

import os
import time
from pathlib import Path

from launch import envvars
from megatron_rl.rewards.functions import exact_match


def raises(completion: str, answer: str | None) -> float:
    raise KeyError("no such column")


def held(completion: str, answer: str | None, *, gate: str) -> float:
    """`exact_match` of the last number. While there is a file `gate`, the reward processes of an attempt score only as
    many completions as the file says (none if it is empty), and then wait."""
    scored = Path(f"{gate}-{Path(os.environ[envvars.JOB_MARK]).name}")       # a byte for each completion
    while _closed(Path(gate), scored):
        time.sleep(0.1)
    with scored.open("ab") as file:
        file.write(b".")
    return exact_match(completion, answer, anywhere="last_number")


def _closed(gate: Path, scored: Path) -> bool:
    try:
        return (scored.stat().st_size if scored.exists() else 0) >= int(gate.read_text() or 0)
    except FileNotFoundError:
        return False


def letters(completion: str, answer: str | None, *, prompt: str) -> float:
    """A number from 0 to 1 that every letter changes, of the prompt too, so that a group has spread and no score fits
    another's completion. It teaches nothing."""
    value = 0
    for letter in f"{prompt}{completion}{answer}":
        value = (31 * value + ord(letter)) % 1009
    return value / 1008
