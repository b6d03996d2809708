"""The project's YAML reader: the safe loader with the scalars of YAML 1.2, and the line of every value.

PyYAML implements YAML 1.1, where `lr: 1e-3` is a string, `on` is true, `010` is 8 and `1:30` is 90. Such silent
surprises are worse than an error, so the resolvers below are those of YAML 1.2's core schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from launch.errors import UserError

Path = tuple[str | int, ...]
"""Keys and list indices down to a value: ("reward", "functions", 0, "weight")."""


class CoreLoader(yaml.SafeLoader):
    """`yaml.SafeLoader` with the scalar types of YAML 1.2."""

    yaml_implicit_resolvers: dict = {}


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in (
        ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
        ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
        ("float", r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$",
         list("-+.0123456789")),
        ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""])):
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
CoreLoader.add_constructor("tag:yaml.org,2002:int", _int)
CoreLoader.add_constructor("tag:yaml.org,2002:float", _float)


@dataclass(frozen=True)
class Document:
    """A parsed file: plain Python values, and the line of every key and list item."""

    values: Any
    lines: dict[Path, int]


def parse(text: str, file: str) -> Document:
    """Parse one YAML document.

    Raises UserError with file and line for broken syntax, duplicate keys (in YAML the last one would win), keys that
    are not plain words, aliases, and tags of Python objects.
    """
    try:
        _refuse_aliases(text, file)
        node = yaml.compose(text, Loader=CoreLoader)
        if node is None:
            return Document({}, {(): 1})
        lines: dict[Path, int] = {}
        _collect_lines(node, (), lines, file)
        return Document(_construct(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"not valid YAML: {error.problem or error.context}",
                        where=f"{file}:{mark.line + 1}" if mark else file,
                        fix="correct the syntax of this line") from error
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML: {error}", where=file, fix="save the file as UTF-8 text") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of brackets
        raise UserError(f"not a configuration: {error}", where=file, fix="remove the oversized value") from error


def parse_value(text: str) -> Any:
    """The value of an override word: a scalar, or a list or mapping in flow style (`[1, 2]`, `{a: 1}`).

    `Answer: 5` stays a string. Raises yaml.YAMLError.
    """
    if text[:1] in ("[", "{", '"', "'"):
        return yaml.load(text, Loader=CoreLoader)  # a subclass of SafeLoader: constructs plain values only
    loader = CoreLoader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, text))
    finally:
        loader.dispose()


def _construct(node: yaml.Node) -> Any:
    loader = CoreLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_aliases(text: str, file: str) -> None:
    for event in yaml.parse(text, Loader=CoreLoader):
        if isinstance(event, yaml.AliasEvent):
            line = f":{event.start_mark.line + 1}" if event.start_mark is not None else ""
            raise UserError(f"*{event.anchor} is a YAML alias", where=f"{file}{line}",
                            fix="write the value out at each key")


def _collect_lines(node: yaml.Node, path: Path, lines: dict[Path, int], file: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _collect_lines(item, (*path, index), lines, file)
        return
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key_node, value_node in node.value:
        line, key = key_node.start_mark.line + 1, key_node.value
        if key_node.tag != "tag:yaml.org,2002:str" or key == "<<":
            raise UserError("a key must be a plain word", where=f"{file}:{line}", fix="write `key: value`")
        if key in seen:
            dotted = ".".join(map(str, (*path, key)))
            raise UserError(f"{dotted} is given twice", where=f"{file}:{line}, {dotted}",
                            fix=f"remove this line or line {seen[key]}")
        seen[key] = line
        lines[(*path, key)] = line
        _collect_lines(value_node, (*path, key), lines, file)
