"""Overrides: `key=value` words of the command line, the same for every command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from launch.config import keys
from launch.config.yaml_file import Path, parse_value
from launch.errors import Problems

_INDEX = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Override:
    """One word of the command line."""

    word: str
    path: Path
    value: Any


def parse_overrides(words: Sequence[str], problems: Problems) -> list[Override]:
    """Parse words such as `run.steps=500`, `reward.functions.0.weight=2` or `data.eval=null`. A value is a YAML scalar,
    or a list or mapping in flow style. Words that cannot be parsed are added to `problems`."""
    overrides = []
    for word in words:
        key, equals, text = word.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            problems.add(f"{word!r} is not an override", where="override", fix="write key=value, as in run.steps=500")
            continue
        try:
            value = parse_value(text.strip())
        except (yaml.YAMLError, ValueError, RecursionError):
            problems.add(f"{key} = {text} is not a YAML value", where=f"override {word!r}",
                         fix="close the bracket or the quote, and quote the word for the shell")
            continue
        overrides.append(Override(word, tuple(int(p) if _INDEX.fullmatch(p) else p for p in parts), value))
    return overrides


def apply(values: Any, override: Override, problems: Problems) -> bool:
    """Set the override's value in the nested `values` and create missing sections. Unknown keys are set too: the schema
    refuses them and names the nearest one. Returns whether the override was applied."""
    where = f"override {override.word!r}"
    at = values
    for depth, part in enumerate(override.path):
        last = depth + 1 == len(override.path)
        here = ".".join(map(str, override.path[:depth])) or "the file"
        if isinstance(at, list):
            if not isinstance(part, int) or part >= len(at):
                valid = f"0 to {len(at) - 1}" if at else "nothing: the list is empty"
                problems.add(f"{here} has no item {part}", where=where, fix=f"valid: {valid}")
                return False
        elif isinstance(at, dict):
            part = str(part)
            if not last and at.get(part) is None:
                at[part] = {}
        else:
            problems.add(f"{here} = {keys.as_written(at)} is a value and has no key {part}", where=where,
                         fix=f"write {here}=... instead")
            return False
        if last:
            at[part] = override.value
        else:
            at = at[part]
    return True
