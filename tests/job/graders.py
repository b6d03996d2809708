"""A reward that a user got wrong."""

from __future__ import annotations


def raises(completion: str, answer: str | None) -> float:
    raise KeyError("no such column")
