"""A coefficient: a number that no formula gives. Each has a unit, a meaning and a source, and a cluster file may replace
any of them by what was measured there."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from launch.planner.book import Book


def coefficient(value: float, unit: str, meaning: str, source: str) -> Any:
    """A field of a `Coefficients` class."""
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source})


@dataclass(frozen=True)
class Coefficients:
    """Base of the coefficient classes, one for each model. `PREFIX.name` is a coefficient's key in the book and in a
    cluster file."""

    PREFIX = ""

    def write(self, book: Book, sources: dict[str, str] | None = None) -> None:
        """Write all down as given numbers; `sources` replaces the default source of those that a site measured."""
        for each in fields(self):
            key = f"{self.PREFIX}.{each.name}"
            source = (sources or {}).get(key, each.metadata["source"])
            book.given(key, getattr(self, each.name), each.metadata["unit"], source)

    def changed(self, values: dict[str, float]) -> Self:
        """A copy with some values replaced, by field name."""
        return replace(self, **values)
