"""What a key means: its type, default and documentation, and what it is in a configuration."""

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
    """A line of the file, an override, `default`, `auto (on this machine)`; of a value that the planner chose, where
    `auto` comes from."""
    planned: bool = False
    """The planner chose it."""


@dataclass(frozen=True)
class Entry:
    """A key as the schema has it."""

    key: str
    """`reward.functions.*.weight` for an item of a list."""
    type: str
    default: str
    """`required`, or the value as YAML has it."""
    meaning: str
    other_names: tuple[str, ...]
    """What neighbouring frameworks call it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def entry(key: Key) -> Entry:
    name = key.dotted.rpartition(".")[2]
    return Entry(key.dotted, keys.type_in_words(key.field), default_in_words(key), meaning(key),
                 tuple(other for other, ours in keys.SYNONYMS.items() if ours == name))


def default_in_words(key: Key) -> str:
    """`required`, or the default as YAML has it."""
    if key.field.default is PydanticUndefined:
        return "required"
    return "that of its keys" if key.section is not None else _written(key.field.default)


def meaning(key: Key) -> str:
    """The documentation of a key as one paragraph."""
    return " ".join((key.field.description or "").split())


def find(word: str) -> Key:
    """The key that `word` names: dotted, with a number or `*` for an item of a list, or the last part alone if only one
    key ends with it.

    Raises:
        UserError: there is none, or there are several; names them, or the nearest.
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
    """The keys right below a section."""
    return [entry(each) for each in keys.all_keys()
            if each.dotted.rpartition(".")[0] in (key.dotted, f"{key.dotted}.*")]


def search(words: Sequence[str]) -> list[Entry]:
    """The keys in whose name, other names or meaning every word stands; those with it in the name first."""
    wanted = [word.lower() for word in words]
    found = [each for each in map(entry, keys.all_keys())
             if all(word in f"{each.key} {' '.join(each.other_names)} {each.meaning}".lower() for word in wanted)]
    return sorted(found, key=lambda each: not all(word in f"{each.key} {' '.join(each.other_names)}".lower()
                                                  for word in wanted))


def resolved(key: Key, word: str, loaded: LoadedConfig, chosen: Mapping[str, Any]) -> dict[str, Resolved]:
    """Dotted key -> what it is in a configuration: the key, or all below it, in every item of a list.

    Args:
        word: as the user wrote it; a number in it chooses an item.
        chosen: what the planner chose, by dotted key.
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
    """What `config explain` prints, at most 100 columns wide."""
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
    """Name, type, default, and the first sentence of what it means, or the whole of it."""
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
