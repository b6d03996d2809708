"""Which coefficients there are, for a cluster file that replaces some of them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields

from launch.planner import coefficients as package
from launch.planner.coefficients.base import Coefficients


def known_coefficients() -> dict[str, str]:
    """Key (`coefficients.<model>.<name>`) -> unit, of every coefficient of the planner's models."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    found: dict[str, str] = {}
    for kind in sorted(Coefficients.__subclasses__(), key=lambda each: each.PREFIX):
        if kind.__module__.startswith(package.__name__):
            found |= {f"{kind.PREFIX}.{each.name}": each.metadata.get("unit", "") for each in fields(kind)}
    return found
