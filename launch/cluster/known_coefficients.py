"""The coefficients that a cluster file may replace, and their allowed values."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import NamedTuple

from launch import coefficients as package
from launch.coefficients.base import ENDS, Coefficients, Range
from launch.errors import nearest

PREFIX = "coefficients."


class Known(NamedTuple):
    """A coefficient that a cluster file may set."""

    shipped: float
    unit: str
    allowed: Range


class Fault(NamedTuple):
    """A problem with a coefficient."""

    key: str
    what: str
    fix: str


@cache
def known_coefficients() -> Mapping[str, Known]:
    """Every coefficient of the planner's models, by key (`coefficients.<model>.<name>`)."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found: dict[str, Known] = {}
    for kind in sorted(Coefficients.__subclasses__(), key=lambda each: each.PREFIX):
        if kind.__module__.startswith(package.__name__):
            shipped = kind()
            found |= {f"{kind.PREFIX}.{each.name}": Known(getattr(shipped, each.name), each.metadata["unit"],
                                                          each.metadata["allowed"]) for each in fields(kind)}
    return found


def faults(values: Mapping[str, float]) -> Iterator[Fault]:
    """Problems of these coefficients, given by key. Missing coefficients have their shipped values."""
    if not values:
        return
    known = known_coefficients()
    sound = True
    for key, value in values.items():
        if key not in known:
            sound = False
            yield Fault(key, f"unknown coefficient {key.removeprefix(PREFIX)}", _nearest(key, known))
        elif value not in known[key].allowed:
            sound = False
            unit = f" {known[key].unit}" if known[key].unit else ""
            yield Fault(key, f"{key} = {value:g}{unit} is out of range: {known[key].allowed}{unit}",
                        f"use the measured value, or remove the entry to get the default {known[key].shipped:g}")
    if sound:
        yield from _disorders(values, known)


def _disorders(values: Mapping[str, float], known: Mapping[str, Known]) -> Iterator[Fault]:
    """Coefficients outside their own uncertainty range."""
    for key in known:
        low_key, high_key = (key + end for end in ENDS)
        if low_key not in known:
            continue
        low, value, high = (values.get(each, known[each].shipped) for each in (low_key, key, high_key))
        if not low <= value <= high:
            given = next(each for each in (key, low_key, high_key) if each in values)
            name = key.rpartition(".")[2]
            yield Fault(given, f"{key} = {value:g} is not between {name}_low = {low:g} and {name}_high = {high:g}",
                        f"set all three: {name}, {name}_low and {name}_high; a missing one has its default")


def _nearest(key: str, known: Mapping[str, Known]) -> str:
    near = nearest(key, known, alike=0.5)
    if near:
        return f"did you mean {near.removeprefix(PREFIX)}?"
    return f"known: {', '.join(sorted(name.removeprefix(PREFIX) for name in known))}"
