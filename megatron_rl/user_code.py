"""Imports what a configuration names as `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.errors import UserError, nearest


def import_named(path: str, what: str, where: str) -> Any:
    """Import `package.module:name`, with the working directory on `sys.path`, as `python -m` would.

    Args:
        what: what the configuration calls it, for messages: `reward`, `curriculum`.
        where: the key of the configuration.
    Raises:
        UserError: the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise UserError(f"{what} {path!r}: importing {module_name} fails with {type(error).__name__}: {error}",
                        where=where, fix=f"make `python -c 'import {module_name}'` work from {Path.cwd()}, "
                                         f"or set PYTHONPATH to the folder that holds it") from error
    found = getattr(module, name, None)
    if found is None:
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(f"{what} {path!r}: {module_name} has no {name!r}", where=where,
                        fix=one_like(name, public, module_name + ":") if public
                        else f"define {name} in {module.__file__}")
    return found


def one_like(name: str, candidates: Sequence[str], prefix: str = "") -> str:
    """What to write instead of `name`: the candidate that is spelled most like it, or one of all."""
    close = nearest(name, candidates, alike=0.5)
    return f"write {prefix}{close}" if close else f"write one of {', '.join(prefix + c for c in candidates)}"
