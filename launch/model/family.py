"""`Family`: turns the config.json of an architecture into an `Architecture`. A family is a file in `families/` or an
entry point of an installed package. docs/models.md explains how to add one.

A feature that changes the numbers and is not modelled is refused by name. Otherwise a model with an unknown rope,
window or bias would train without an error and be wrong.
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
"""Entry-point group for families of other packages: architecture name -> `Family`."""
RESTORE = "restore the model's own config.json"


class Fields:
    """Typed access to a config.json. Every error gives the field, the value and the file."""

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
        """Raise UserError for a field whose value is not modelled."""
        raise UserError(f"{name} = {self.config.get(name)!r}: {what}", where=self.where, fix=fix)

    def refuse_if_set(self, what: str, fix: str, *names: str) -> None:
        """Refuse the first of these fields that is set, to anything but null, 0 or false."""
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
    """A family of models."""

    architecture: str
    """The entry in `architectures` of config.json: `LlamaForCausalLM`."""
    model_type: str
    read: Callable[[Fields], Mapping[str, Any]]
    """Read the fields of `Architecture` that `hf_config` does not read for all families: features of the layer, and
    `kv_heads` and `head_dim` if the family has its own defaults. It refuses features that only this family does not
    model."""
    published: Mapping[str, Architecture] = field(default_factory=dict)
    """Published models by name, for planning without weights."""
    window_has_switch: bool = False
    """Whether `sliding_window` has an effect only with `use_sliding_window: true`."""
    trains: bool = True
    """False: can be planned, but the trainer has no layer for it."""


def find(architecture: Any, where: str) -> Family:
    """The family of an architecture: built in, or from an installed package.

    Raises:
        UserError: the architecture is unknown, a package's family cannot be imported or is not a `Family`, or two
            packages have one.
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
        raise UserError(f"{len(found)} packages have a family for {name}", where=brought,
                        fix="uninstall all but one")
    try:
        (family,) = (point.load() for point in found)
    except Exception as error:     # a package's import may raise anything
        raise UserError(f"the family of {name} cannot be imported: {error!r}", where=brought,
                        fix="repair or uninstall this package") from error
    if not isinstance(family, Family) or family.architecture != name:
        raise UserError(f"the entry point is not a Family for {name}: {family!r}", where=brought,
                        fix="see docs/models.md, Adding a family")
    return family


def trainable() -> list[str]:
    """Names of the architectures that the trainer runs, built in or from installed packages."""
    return [*(name for name, family in built_in().items() if family.trains),
            *sorted({point.name for point in installed()} - set(built_in()))]


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Entry points of installed packages, not yet imported."""
    return tuple(entry_points(group=GROUP))


@cache
def built_in() -> dict[str, Family]:
    """Architecture name -> family, for every file in `families/`."""
    from launch.model import families
    modules = [importlib.import_module(f"{families.__name__}.{each.name}")
               for each in pkgutil.iter_modules(families.__path__)]
    return {module.FAMILY.architecture: module.FAMILY for module in modules}
