"""Numbers in text, compared exactly."""

from __future__ import annotations

import re
from decimal import Decimal

_SIGN = r"(?:(?<![\w)])[-+\u2212]\$?|\$-?)?"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"{_SIGN}(?:{_DIGITS})")
_MARKER = re.compile(r"####([^\n]*)")


def parse_number(text: str) -> Decimal | None:
    """The value of a text that consists of one number (`-1,234.50`, `$72`, `72.`), otherwise None.

    Commas count only between groups of three digits, so `1,23` is two numbers.
    """
    match = _NUMBER.fullmatch(text.strip().removesuffix("."))
    return _value(match.group()) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number in a text. None if there is none, or if it is part of something else (`1/2`, `3,4,5`, `1e5`),
    because the 2 in `1/2` is not an answer. In `3+4=7` it is the number after the equals sign."""
    words = [word for word in text.split() if re.search("[0-9]", word)]
    return _only_number(words[-1].rpartition("=")[2]) if words else None


def marked_number(text: str) -> Decimal | None:
    """The number on the line of GSM8K's marker, as in `#### 72`. The line may contain words (`#### 72 apples`).

    None if there is no marker, if its line has no number or two (`#### 72 or 73`), or if several markers disagree: an
    answer with two numbers is not an answer.
    """
    values = {_only_number(line) for line in _MARKER.findall(text)}
    return values.pop() if len(values) == 1 else None


def _only_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return _value(numbers[0]) if len(numbers) == 1 else None


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$]", "", number).replace("\u2212", "-"))
