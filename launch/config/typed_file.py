"""YAML files beside a run's configuration (clusters, site profiles): read into a typed model, or refused with the
line of every key and the nearest name that there is."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from launch.config import keys, yaml_file
from launch.config.problems import Problems
from launch.errors import UserError

Model = TypeVar("Model", bound=BaseModel)
Special = Callable[[str, dict], "tuple[str, str] | None"]
"""(dotted key, pydantic's error) -> (what, fix) where a file has words of its own for an error."""


def read_text(file: str, kind: str, example: str) -> str:
    """The text of a file, line ends as they are. `kind` and `example` are for messages. Raises UserError."""
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
        UserError: no mapping, unknown keys, missing keys and wrong types, all at once.
    """
    if not isinstance(document.values, dict):
        raise UserError(f"a {kind} is a mapping of sections", where=f"{file}:1", fix=f"see {example}")
    problems = Problems(file)
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        _explain(error, model, document, file, problems, special)
    problems.raise_if_any()
    raise AssertionError("pydantic named no error")


def line_of(document: yaml_file.Document, file: str, path: yaml_file.Path) -> str:
    """The line of a value, or of the nearest section around it that the file holds: `FILE:3, gpus.kind`."""
    for end in range(len(path), -1, -1):
        if path[:end] in document.lines:
            return f"{file}:{document.lines[path[:end]]}" + (f", {keys.dotted(path)}" if path else "")
    return file


def _explain(error: ValidationError, model: type[BaseModel], document: yaml_file.Document, file: str,
             problems: Problems, special: Special | None) -> None:
    known = {key.dotted: key for key in keys.all_keys(model)}
    open_sections = {name for name, key in known.items()
                     if key.section is None and "dict" in str(key.field.annotation)}
    seen: set[yaml_file.Path] = set()
    for item in error.errors(include_url=False):
        path = tuple(item["loc"])
        while len(path) > 1 and str(path[0]) not in open_sections and item["type"] != "extra_forbidden" and \
                keys.pattern(path) not in known:
            path = path[:-1]                              # pydantic appends which member of a union it tried
        if path in seen:
            continue
        seen.add(path)
        key, where = keys.dotted(path), line_of(document, file, path)
        field = known.get(keys.pattern(path))
        own = special(key, item) if special is not None else None
        if own is not None:
            problems.add(own[0], where=where, fix=own[1])
        elif item["type"] == "extra_forbidden":
            problems.add(f"unknown key {key}", where=where, fix=_nearest(path, known))
        elif item["type"] == "missing":
            problems.add(f"{key} is missing", where=where,
                         fix=f"add {key}: {keys.type_in_words(field.field) if field else 'a value'}")
        else:
            expected = keys.type_in_words(field.field) if field else item["msg"]
            problems.add(f"{key} = {keys.as_written(item['input'])} is not valid", where=where,
                         fix=f"expected: {expected}")


def _nearest(path: yaml_file.Path, known: dict[str, keys.Key]) -> str:
    parent, wanted = keys.pattern(path[:-1]), str(path[-1])
    here = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    close = difflib.get_close_matches(wanted, here, n=1, cutoff=0.6)
    if close:
        return f"did you mean {keys.dotted((*path[:-1], close[0]))}?"
    everywhere = {name.rpartition(".")[2]: name for name in sorted(known, key=len, reverse=True)}
    close = difflib.get_close_matches(wanted, everywhere, n=1, cutoff=0.7)
    if close:
        return f"did you mean {everywhere[close[0]].replace('*', '0')}?"
    return f"valid here: {', '.join(here) or 'nothing'}"
