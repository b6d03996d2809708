"""A coefficient: a number that no formula gives. Each has a unit, a meaning, a source and a range, and a cluster file
may replace any of them by what was measured there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True)
class Range:
    """Between which a coefficient makes sense, ends included. Beyond it stands a slip, such as a share in per cent, and
    the models would divide by nothing or overflow."""

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


SHARE = Range(1e-3, 1)
"""Of a rate or a limit: it is divided by."""
PART = Range(0, 1)
"""Of a time or a size, which may be nothing."""
FACTOR = Range(1e-6, 100)
"""What a site's runs make of a predicted rate or time: tiny models on fast machines keep little of it, and where the
prediction is rough, more than all."""
OF_UNIT = {"s": Range(0, 1e5), "bytes": Range(1, 1e12), "bytes/s": Range(1e3, 1e18), "h": Range(1e-3, 1e9)}
"""By the first word of a unit."""
ENDS = ("_low", "_high")
"""What a coefficient's name and those of the ends of its uncertainty differ by."""


def coefficient(value: float, unit: str, meaning: str, source: str, allowed: Range | None = None) -> Any:
    """A field of a `Coefficients` class.

    Args:
        allowed: what a cluster file may put in its place; default: by the unit, a share where it has none.
    """
    allowed = allowed or (OF_UNIT[unit.split()[0]] if unit else SHARE)
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source, "allowed": allowed})


@dataclass(frozen=True)
class Coefficients:
    """Base of the coefficient classes, one for each model. `PREFIX.name` is a coefficient's key in the book and in a
    cluster file."""

    PREFIX = ""

    def changed(self, values: dict[str, float]) -> Self:
        """A copy with some values replaced, by field name."""
        return replace(self, **values)
