"""Slurm's host lists: `node[001-003,7],gpu[1-2]-ib[0-1]`. Pure, so that a login node without Slurm can read them too.

`scontrol show hostnames` cannot validate a list: for one it cannot read, it prints nothing or half a name and exits 0.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from launch.errors import UserError

LIMIT = 100_000
"""A list with more names than this is a typing error, not a cluster."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_LAST_NUMBER = re.compile(r"(.*?)(\d*)(\D*)")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def expand(text: str, where: str | None = None) -> tuple[str, ...]:
    """All names of a host list, in its order. Numbers keep the width of the low end of their range, as in Slurm.

    Raises:
        UserError: the list has an unclosed or empty bracket, a reversed range, an empty name or an invalid host name.
    """
    names: list[str] = []
    for part in _split(text, where):
        pieces = re.split(r"\[([^\[\]]*)\]", part)          # alternates: plain text, content of a bracket
        if any(mark in piece for piece in pieces[0::2] for mark in "[]"):
            raise _broken(text, f"{part!r} has an unmatched bracket", where)
        choices: list[list[str]] = []
        total = 1
        for index, piece in enumerate(pieces):
            choices.append([piece] if index % 2 == 0 else _numbers(piece, text, where))
            total *= len(choices[-1])
            if total + len(names) > LIMIT:
                raise _broken(text, f"it names more than {LIMIT} nodes", where)
        for name in map("".join, itertools.product(*choices)):
            if not _NAME.fullmatch(name):
                raise _broken(text, f"{name!r} is not a host name" if name else "there is an empty name", where)
            names.append(name)
    return tuple(names)


def compress(names: Iterable[str]) -> str:
    """A short host list that `expand` turns back into these names: each name once, numbers in order.
    Only the last number of a name becomes a range."""
    runs: dict[tuple[str, str], list[tuple[str, str]]] = {}            # (before, after the number) -> (low, high)
    parts = [_LAST_NUMBER.fullmatch(name) for name in set(names)]
    for match in sorted((part for part in parts if part), key=lambda part: (part[1], part[3], len(part[2]) and
                                                                             int(part[2] or 0), part[2])):
        found = runs.setdefault((match[1], match[3]), [])
        number = match[2]
        if found and number and str(int(found[-1][1]) + 1).zfill(len(found[-1][0])) == number:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    texts = []
    for (before, after), found in runs.items():
        inside = ",".join(low if low == high else f"{low}-{high}" for low, high in found)
        texts.append(f"{before}[{inside}]{after}" if "," in inside or "-" in inside else f"{before}{inside}{after}")
    return ",".join(texts)


def _split(text: str, where: str | None) -> Iterator[str]:
    """Parts between the commas that are outside brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _broken(text, "its brackets do not match", where)
        if letter == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if depth:
        raise _broken(text, "a bracket is not closed", where)
    yield text[start:].strip()


def _numbers(inside: str, text: str, where: str | None) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or not part.isascii():
            raise _broken(text, f"[{inside}] contains {part!r}, which is neither a number nor a range", where)
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _broken(text, f"the range {part} is reversed", where)
        if int(high) - int(low) >= LIMIT - len(numbers):
            raise _broken(text, f"it names more than {LIMIT} nodes", where)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def _broken(text: str, why: str, where: str | None) -> UserError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return UserError(f"{shown!r} is not a list of nodes: {why}", where=where,
                     fix="use Slurm's syntax: node[001-032], or a-01,a-02")
