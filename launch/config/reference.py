"""Documentation of a key: type, default and meaning, and its value in a configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from launch.config import keys
from launch.config.keys import Key
from launch.config.load import LoadedConfig
from launch.errors import UserError

WIDTH = 100
LABEL = 9


@dataclass(frozen=True)
class Resolved:
    """A key in one configuration."""

    value: Any
    source: str
    """A line of the file, an override, `default` or `auto (on this machine)`. For a value that the planner chose: the
    source of its `auto`."""
    planned: bool = False
    """Whether the planner chose the value."""


@dataclass(frozen=True)
class Entry:
    """A key in the schema."""

    key: str
    """`reward.functions.*.weight` for an item of a list."""
    type: str
    default: str
    """`required`, or the value in YAML."""
    meaning: str
    other_names: tuple[str, ...]
    """Its names in other frameworks."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def entry(key: Key) -> Entry:
    name = key.dotted.rpartition(".")[2]
    return Entry(key.dotted, keys.type_in_words(key.field), default_in_words(key), meaning(key),
                 tuple(other for other, ours in keys.SYNONYMS.items() if ours == name))


def default_in_words(key: Key) -> str:
    """`required`, or the default in YAML."""
    if key.field.default is PydanticUndefined:
        return "required"
    return "that of its keys" if key.section is not None else _written(key.field.default)


def meaning(key: Key) -> str:
    """The documentation of a key as one paragraph."""
    return " ".join((key.field.description or "").split())


def find(word: str) -> Key:
    """The key with a name: dotted, with a number or `*` for an item of a list, or only the last part if it is unique.

    Raises:
        UserError: there is no such key, or several. The message lists the candidates or the nearest key.
    """
    path = _path(word)
    while path and (isinstance(path[-1], int) or path[-1] == "*"):
        path = path[:-1]            # an item of a list: the list has the type
    known = {key.dotted: key for key in keys.all_keys()}
    if keys.pattern(path) in known:
        return known[keys.pattern(path)]
    same = [dotted for dotted in known if dotted.rpartition(".")[2] == keys.SYNONYMS.get(word, word)]
    if len(same) == 1:
        return known[same[0]]
    near = " or ".join(same) or keys.nearest(path)
    raise UserError(f"{len(same)} keys are called {word}" if same else f"there is no key {word}",
                    where="megatron-rl config explain",
                    fix=f"did you mean {near}?" if near else f"megatron-rl config search {word} reads the texts")


def members(key: Key) -> list[Entry]:
    """The keys directly below a section."""
    return [entry(each) for each in keys.all_keys()
            if each.dotted.rpartition(".")[0] in (key.dotted, f"{key.dotted}.*")]


def search(words: Sequence[str]) -> list[Entry]:
    """The keys that have every word in their name, other names or meaning. Matches in a name come first."""
    wanted = [word.lower() for word in words]
    found = [each for each in map(entry, keys.all_keys())
             if all(word in f"{each.key} {' '.join(each.other_names)} {each.meaning}".lower() for word in wanted)]
    return sorted(found, key=lambda each: not all(word in f"{each.key} {' '.join(each.other_names)}".lower()
                                                  for word in wanted))


def resolved(key: Key, word: str, loaded: LoadedConfig, chosen: Mapping[str, Any]) -> dict[str, Resolved]:
    """Dotted key -> its value in a configuration, for the key or all keys below it, in every item of a list.

    Args:
        word: the key as the user wrote it. A number in it selects an item.
        chosen: values that the planner chose, by dotted key.
    """
    found = {}
    for dotted, source in loaded.sources.items():
        numbered = any(part.isdecimal() for part in word.split("."))
        this, wanted = (dotted, word) if numbered else (keys.pattern(_path(dotted)), key.dotted)
        if f"{this}.".startswith(f"{wanted}."):
            planned = dotted in chosen and loaded.value(dotted) == "auto"
            found[dotted] = Resolved(chosen[dotted] if planned else loaded.value(dotted), str(source), planned)
    return found


def _written(value: object) -> str:
    return value if isinstance(value, str) else keys.as_written(value)


def _path(dotted: str) -> tuple[int | str, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


def as_text(found: Entry, inside: Sequence[Entry], values: Mapping[str, Resolved] | None = None,
            note: str = "") -> str:
    """The output of `config explain`, at most 100 columns wide."""
    lines = [found.key, *_wrapped(found.meaning, 2, 2), ""]
    lines += _field("type", found.type) + _field("default", found.default)
    if found.other_names:
        lines += _field("also", f"{', '.join(found.other_names)} (in other frameworks)")
    for dotted, value in (values or {}).items():
        told = _written(value.value) + (f" (chosen by the planner; auto: {value.source})" if value.planned
                                              else f" ({value.source})")
        lines += _field("value", told if dotted == found.key else f"{dotted} = {told}")
    if note:
        lines += _field("note", note)
    return "\n".join([*lines, *(["", *list_text(inside)] if inside else [])])


def list_text(entries: Sequence[Entry], *, whole: bool = False) -> list[str]:
    """Name, type, default, and the first sentence of the meaning, or the whole meaning."""
    lines = []
    for each in entries:
        default = each.default if each.default == "required" else f"default {each.default}"
        text = each.meaning if whole else _first_sentence(each.meaning)
        lines += [f"{each.key}  ({each.type}; {default})", *_wrapped(text, 4, 4)]
    return lines


def _first_sentence(text: str) -> str:
    end = text.find(". ")
    return text if end < 0 else text[:end + 1]


def _field(label: str, text: str) -> list[str]:
    return _wrapped(f"{label:<{LABEL}}{text}", 2, 2 + LABEL)


def _wrapped(text: str, first: int, rest: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * first, subsequent_indent=" " * rest,
                         break_long_words=False, break_on_hyphens=False)
