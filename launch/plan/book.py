"""The book of a plan: every number with its formula, its inputs and where they came from, written down while it is
computed. `megatron-rl plan explain` prints it; nothing is derived a second time for the explanation.

    hidden = book.given("model.hidden", 8192, "", "configs/70b/grpo.yaml:12, model.path")
    width = book.computed("training.memory.logits", hidden * 4, "bytes", "tokens x V/TP x 10", ("model.hidden", ...))

Models take `book: Book = NO_BOOK`, which keeps nothing: the search runs thousands of candidates through the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Entry:
    """One number. `inputs` are keys of other entries; a given number has none and a source instead."""

    key: str
    value: float
    unit: str
    """bytes, s, FLOP, tokens/s, ... or empty."""
    formula: str = ""
    """In the field's symbols, with the paper or page it comes from where it is not plain arithmetic."""
    inputs: tuple[str, ...] = ()
    source: str = ""


class Book:
    """Entries in the order in which they were written. A key is written once; writing the same number again is allowed
    (two models may use one), writing another is a bug."""

    keeps = True

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def given(self, key: str, value: Number, unit: str, source: str) -> Number:
        """Write down an input and return it."""
        self._write(Entry(key, value, unit, source=source))
        return value

    def computed(self, key: str, value: Number, unit: str, formula: str, inputs: Iterable[str]) -> Number:
        """Write down a result and return it. Every input must have been written before."""
        entry = Entry(key, value, unit, formula, tuple(inputs))
        missing = [name for name in entry.inputs if name not in self._entries]
        if missing:
            raise KeyError(f"{key} is computed from {', '.join(missing)}, which nobody has written down")
        self._write(entry)
        return value

    def _write(self, entry: Entry) -> None:
        if self._entries.setdefault(entry.key, entry) != entry:
            raise ValueError(f"{entry.key} is in the book as {self._entries[entry.key]}, not {entry}")

    def __getitem__(self, key: str) -> Entry:
        return self._entries[key]

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def leaves(self, key: str) -> tuple[str, ...]:
        """Keys of the given numbers that `key` rests on, in the book's order."""
        found, todo = set(), [key]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self._entries[name].inputs
        return tuple(name for name in self._entries if name in found and not self._entries[name].inputs)

    def dependents(self, key: str) -> tuple[str, ...]:
        """Keys of all numbers that rest on `key`, in the book's order."""
        reached = {key}
        for entry in self._entries.values():     # inputs are written before what they are used for
            if reached.intersection(entry.inputs):
                reached.add(entry.key)
        return tuple(name for name in self._entries if name in reached and name != key)


class _NoBook(Book):
    """Keeps nothing."""

    keeps = False

    def given(self, key: str, value: Number, unit: str, source: str) -> Number:
        return value

    def computed(self, key: str, value: Number, unit: str, formula: str, inputs: Iterable[str]) -> Number:
        return value


NO_BOOK: Book = _NoBook()
