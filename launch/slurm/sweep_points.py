"""The points of a sweep: every combination of the overrides that list several values. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launch.errors import UserError

MOST = 256
_UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep."""

    name: str
    """Name of its run: `tiny-seed0-lr1e-5`."""
    words: tuple[str, ...]
    """Its overrides, fixed ones first."""
    values: dict[str, str]
    """Key -> value of the swept keys."""
    base: str
    """Name of the base run: `tiny`."""


def points(words: Sequence[str], run_name: str) -> list[SweptRun]:
    """`run.seed=0,1 trainer.optimizer.lr=1e-5,2e-5 run.steps=10` -> four points.

    A comma inside brackets, braces or quotes belongs to the value.

    Raises:
        UserError: no override lists several values, one lists a value twice, or there are too many points.
    """
    fixed, swept = [], {}
    for word in words:
        key, equals, text = word.partition("=")
        values = split(text) if equals else [text]
        if len(values) < 2:
            fixed.append(word)
            continue
        if "" in values or len(set(values)) < len(values):
            raise UserError(f"{word} has an empty or repeated value", where=f"override {word!r}",
                            fix="give each value once, as in run.seed=0,1,2")
        if key in swept:
            raise UserError(f"{key} is swept twice", where=f"override {word!r}",
                            fix="put all its values into one override")
        swept[key] = values
    if not swept:
        raise UserError("nothing is swept: no override lists several values", where="--sweep",
                        fix="separate values by commas, as in run.seed=0,1 trainer.optimizer.lr=1e-5,2e-5")
    count = 1
    for values in swept.values():
        count *= len(values)
    if count > MOST:
        raise UserError(f"the sweep has {count} points, more than {MOST}", where="--sweep", fix="sweep fewer values")
    base = next((word.partition("=")[2] for word in reversed(fixed) if word.startswith("run.name=")), run_name)
    fixed = [word for word in fixed if not word.startswith("run.name=")]
    found = []
    for combination in itertools.product(*swept.values()):
        chosen = dict(zip(swept, combination, strict=True))
        suffixes = [f"{_short(key)}{_safe(value)}" for key, value in chosen.items()]
        name = chosen.get("run.name") or "-".join([base, *suffixes])
        own = [f"{key}={value}" for key, value in chosen.items() if key != "run.name"]
        found.append(SweptRun(name, (*fixed, *own, f"run.name={name}"), chosen, base))
    names = [point.name for point in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two points of the sweep would use the run {twice}", where="--sweep",
                        fix="sweep values that differ in letters or digits, or also sweep run.name")
    return found


def split(text: str) -> list[str]:
    """The parts between commas that are outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _short(key: str) -> str:
    return key.rpartition(".")[2].replace("_", "")


def _safe(value: str) -> str:
    return _UNSAFE.sub("-", value).strip("-")
