"""A family: how the config.json of an architecture becomes an `Architecture`. Each is one file in `families/`, or comes
from a package that is installed, through an entry point. docs/models.md says how to add one.

Whatever changes the numbers and is not modelled is refused by name: a model that is loaded although its rope, window or
biases are not understood trains without an error and is wrong.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from launch.errors import UserError
from launch.model.architecture import Architecture

GROUP = "megatron_rl.families"
"""Entry-point group of families that other packages bring: the name is the architecture's, the object a `Family`."""
RESTORE = "restore the model's own config.json"


class Fields:
    """Typed access to a config.json; every failure names the field, the value and the file."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def refuse(self, name: str, what: str, fix: str) -> NoReturn:
        """Raise UserError: the value of `name` asks for something that is not modelled."""
        raise UserError(f"{name} = {self.config.get(name)!r}: {what}", where=self.where, fix=fix)

    def refuse_if_set(self, what: str, fix: str, *names: str) -> None:
        """Refuse the first of these fields that is set to anything but null, 0 or false."""
        for name in names:
            if self.config.get(name):
                self.refuse(name, what, fix)

    def _value(self, name: str, default: Any) -> Any:
        value = self.config.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{name} is missing", where=self.where, fix=RESTORE)
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> UserError:
        return UserError(f"{name} = {value!r} is not {expected}", where=self.where, fix=RESTORE)


@dataclass(frozen=True)
class Family:
    """What this program knows of a family."""

    architecture: str
    """As in `architectures` of its config.json: `LlamaForCausalLM`."""
    model_type: str
    read: Callable[[Fields], Mapping[str, Any]]
    """From its config.json the fields of `Architecture` that `hf_config` does not read alike for all: features of the
    layer, and `kv_heads` and `head_dim` where their defaults are the family's own. Refuses by name what it does not
    model, beyond what no family here models."""
    published: Mapping[str, Architecture] = field(default_factory=dict)
    """Published models by name: a run can be planned before its weights are there."""
    window_has_switch: bool = False
    """`sliding_window` counts only with `use_sliding_window: true`."""
    trains: bool = True
    """False: can be planned, the trainer has no layer for it."""


def find(architecture: Any, where: str) -> Family:
    """The family of an architecture's name: built in, or of an installed package.

    Raises:
        UserError: nobody knows it; a package's family cannot be imported, is no `Family`, or two packages bring it.
    """
    name = architecture if isinstance(architecture, str) else ""
    if name in built_in():
        return built_in()[name]
    found = [point for point in installed() if point.name == name]
    if not found:
        raise UserError(f"architecture {architecture!r} is not supported", where=where,
                        fix=f"use a model of {', '.join(trainable())}")
    brought = f"entry point {GROUP} {name} of {', '.join(sorted(point.value for point in found))}"
    if len(found) > 1:
        raise UserError(f"{len(found)} packages bring the architecture {name}", where=brought,
                        fix="uninstall all but one")
    try:
        (family,) = (point.load() for point in found)
    except Exception as error:     # whatever a package's import raises
        raise UserError(f"the family of {name} cannot be imported: {error!r}", where=brought,
                        fix="repair or uninstall the package that brings it") from error
    if not isinstance(family, Family) or family.architecture != name:
        raise UserError(f"the entry point does not name a Family of {name}: {family!r}", where=brought,
                        fix="see docs/models.md, Adding a family")
    return family


def trainable() -> list[str]:
    """Names of the architectures that the trainer runs, built in or of installed packages."""
    return [*(name for name, family in built_in().items() if family.trains),
            *sorted({point.name for point in installed()} - set(built_in()))]


@cache
def installed() -> tuple[EntryPoint, ...]:
    """What installed packages bring; nothing of theirs is imported yet."""
    return tuple(entry_points(group=GROUP))


@cache
def built_in() -> dict[str, Family]:
    """Architecture's name -> family, of every file in `families/`."""
    from launch.model import families
    modules = [importlib.import_module(f"{families.__name__}.{each.name}")
               for each in pkgutil.iter_modules(families.__path__)]
    return {module.FAMILY.architecture: module.FAMILY for module in modules}
