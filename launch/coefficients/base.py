"""A coefficient is a number that no formula gives. Each has a unit, a meaning, a source and a valid range. A cluster
file may replace any of them with a value measured on that cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True)
class Range:
    """Valid range of a coefficient, ends included. A value outside it is a mistake, such as a share given in per cent,
    and would make the models divide by zero or overflow."""

    least: float
    most: float

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f"{self.least:g} to {self.most:g}"


SHARE = Range(1e-3, 1)
"""Share of a rate or a limit. It is used as a divisor, so it is not zero."""
PART = Range(0, 1)
"""Share of a time or a size. It may be zero."""
FACTOR = Range(1e-6, 100)
"""Measured over predicted at a site: small for tiny models on fast machines, above 1 where the prediction is rough."""
OF_UNIT = {"s": Range(0, 1e5), "bytes": Range(1, 1e12), "bytes/s": Range(1e3, 1e18), "h": Range(1e-3, 1e9)}
"""Default range, by the first word of the unit."""
ENDS = ("_low", "_high")
"""Suffixes of the names of a coefficient's lower and upper bounds."""


def coefficient(value: float, unit: str, meaning: str, source: str, allowed: Range | None = None) -> Any:
    """A field of a `Coefficients` class.

    Args:
        allowed: values that a cluster file may set. Default: the range of the unit, or `SHARE` without a unit.
    """
    allowed = allowed or (OF_UNIT[unit.split()[0]] if unit else SHARE)
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source, "allowed": allowed})


@dataclass(frozen=True)
class Coefficients:
    """Base of the coefficient classes, one per model. `PREFIX.name` is a coefficient's key in the book and in a cluster
    file."""

    PREFIX = ""

    def changed(self, values: dict[str, float]) -> Self:
        """A copy with some values replaced, by field name."""
        return replace(self, **values)
