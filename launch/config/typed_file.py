"""Reads YAML files (runs, clusters, site profiles) into a typed model. Errors give the place of every bad key and the
nearest valid name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from launch.config import keys, yaml_file
from launch.errors import Problems, UserError

Model = TypeVar("Model", bound=BaseModel)
Special = Callable[[str, dict[str, Any]], "tuple[str, str] | None"]
"""(dotted key, pydantic's error) -> (what, fix), or None for the general message."""


def read_text(file: str, kind: str, example: str) -> str:
    """The text of a file with its line ends. `kind` and `example` are for messages. Raises UserError."""
    try:
        with open(file, encoding="utf-8", newline="") as stream:
            return stream.read()
    except FileNotFoundError:
        raise UserError(f"no {kind} {file}", where=os.path.abspath(file),
                        fix=f"give the path of a {kind}, for instance {example}") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder", where=os.path.abspath(file), fix="give the YAML file in it") from None
    except (OSError, ValueError) as error:                # ValueError: not UTF-8, or a NUL in the name
        raise UserError(f"cannot read {file}: {error}", where=os.path.abspath(file),
                        fix="make it a readable UTF-8 text file") from error


def validated(model: type[Model], document: yaml_file.Document, file: str, kind: str, example: str, *,
              special: Special | None = None) -> Model:
    """The typed content of a parsed file.

    Raises:
        UserError: not a mapping; or all unknown keys, missing keys and wrong types at once.
    """
    if not isinstance(document.values, dict):
        raise UserError(f"a {kind} is a mapping of sections", where=f"{file}:1", fix=f"see {example}")
    return checked(model, document.values, lambda path: line_of(document, file, path), Problems(file), special=special)


def checked(model: type[Model], values: object, where: Callable[[yaml_file.Path], str], problems: Problems, *,
            special: Special | None = None) -> Model:
    """Nested plain values as a typed model.

    Args:
        where: returns the place of a key, for messages.
        problems: problems found earlier, to be shown with the new ones.
        special: messages of this kind of file for some errors.

    Raises:
        UserError: all unknown keys, missing keys, wrong types and earlier `problems` at once.
    """
    try:
        content = model.model_validate(values)
    except ValidationError as error:
        _refuse(error, model, where, problems, special)
    problems.raise_if_any()
    return content


def line_of(document: yaml_file.Document, file: str, path: yaml_file.Path) -> str:
    """The line of a value, or of the nearest section around it in the file: `FILE:3, gpus.kind`."""
    for end in range(len(path), -1, -1):
        if path[:end] in document.lines:
            return f"{file}:{document.lines[path[:end]]}" + (f", {keys.dotted(path)}" if path else "")
    return file


def _refuse(error: ValidationError, model: type[BaseModel], where: Callable[[yaml_file.Path], str], problems: Problems,
            special: Special | None) -> NoReturn:
    known = {key.dotted: key for key in keys.all_keys(model)}
    told: set[yaml_file.Path] = set()
    for item in error.errors(include_url=False):
        path = _without_union_branch(tuple(item["loc"]), known)
        if path in told:        # each branch of `integer or auto` gives an error
            continue
        told.add(path)
        key, field = keys.dotted(path), known.get(keys.pattern(path))
        own = special(key, dict(item)) if special is not None else None
        if own is not None:
            what, fix = own
        elif item["type"] == "extra_forbidden":
            what, near = f"unknown key {key}", keys.nearest(path, model)
            here = ", ".join(keys.members(path[:-1], model)) or "nothing"
            fix = f"did you mean {near}?" if near else f"valid here: {here}"
        elif item["type"] == "missing":
            what, fix = f"{key} is missing", f"add {key}: {keys.type_in_words(field.field) if field else 'a value'}"
        else:
            what = f"{key} = {keys.as_written(item['input'])}{_type_of(item['input'])} is not valid"
            fix = f"expected: {keys.type_in_words(field.field) if field else item['msg']}"
        problems.add(what, where=where(path), fix=fix)
    problems.raise_if_any()
    raise AssertionError("pydantic named no error")


def _without_union_branch(path: yaml_file.Path, known: Mapping[str, keys.Key]) -> yaml_file.Path:
    """Remove the branch of a union that pydantic adds to the place of an error (`trainer.tp.constrained-int`)."""
    for end in range(1, len(path)):
        key = known.get(keys.pattern(path[:end]))
        if key is not None and key.is_union:
            return path[:end]
    return path


def _type_of(value: Any) -> str:
    names = {bool: "true or false", int: "integer", float: "number", str: "text", list: "list", dict: "mapping"}
    return "" if value is None else f" ({names.get(type(value), type(value).__name__)})"
