"""Published models by name, so that a run can be planned without weights. Their sizes are in `families/`."""

from __future__ import annotations

import re
from functools import cache

from launch.errors import UserError, nearest_few
from launch.model.architecture import Architecture
from launch.model.family import built_in


@cache
def published() -> dict[str, Architecture]:
    """Every published model of the built-in families, by name."""
    return {name: model for family in built_in().values() for name, model in family.published.items()}


def known(name: str) -> str | None:
    """The published model that a name stands for, or None. Case, a leading Hugging Face organisation, `-Instruct` and
    `-Base` are ignored; `llama3-8b` means `llama-3-8b`, `llama31-405b` means `llama-3.1-405b`."""
    plain = name.strip().lower().rsplit("/", 1)[-1].removeprefix("meta-")
    plain = re.sub(r"-(instruct|base)(?=-|$)", "", plain)
    plain = re.sub(r"^llama-?3\.?([1-3])-", r"llama-3.\1-", plain).replace("llama3-", "llama-3-")
    return plain if plain in published() else None


def from_builtin(name: str, where: str | None = None) -> Architecture:
    """A published model.

    Raises:
        UserError: unknown name. The message lists the nearest and all names.
    """
    key = known(str(name))
    if key is None:
        close = nearest_few(str(name).lower().rsplit("/", 1)[-1], published(), alike=0.4)
        raise UserError(f"no built-in model {name!r}", where=where,
                        fix=(f"nearest: {', '.join(close)}; " if close else "") + f"known: {', '.join(published())}")
    return published()[key]
