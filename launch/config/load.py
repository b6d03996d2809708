"""Reads a run's YAML and overrides into a `RunConfig` with the source of every value."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from launch.config import auto, keys, overrides, typed_file, yaml_file
from launch.config.resolved import ResolvedConfig, resolve
from launch.config.schema import RunConfig
from launch.config.yaml_file import Path
from launch.errors import Problems, UserError

EXAMPLE = "configs/tiny/grpo.yaml"


@dataclass(frozen=True)
class Source:
    """The origin of a value: a line of the file, a word of the command line, the schema's default, or `auto` for an
    open key that got its value for this machine."""

    kind: Literal["file", "override", "default", "auto"]
    file: str | None = None
    line: int | None = None
    word: str | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.file}:{self.line}"
        names = {"override": f"override {self.word!r}", "auto": "auto (on this machine)"}
        return names.get(self.kind, self.kind)


@dataclass(frozen=True)
class LoadedConfig:
    """A run's configuration and the source of every value."""

    config: RunConfig
    sources: Mapping[str, Source]
    """Dotted key -> source, for every leaf: `reward.functions.0.weight`."""
    path: str

    def where(self, *dotted_keys: str) -> str:
        """The places of keys for messages: `configs/tiny/grpo.yaml:14, trainer.tp`."""
        return "; ".join(self._where(key) for key in dotted_keys)

    def _where(self, key: str) -> str:
        source = self.sources.get(key)
        if source is None:
            return f"{self.path}, {key}"
        if source.kind in ("file", "override"):
            return f"{source}, {key}"
        return f"{self.path}, {key} ({source.kind})"

    def resolved(self, values: Mapping[str, Any]) -> ResolvedLoaded:
        """The configuration with values for its open keys, by dotted key. Raises ValueError if a key stays open."""
        return ResolvedLoaded(resolve(self.config, values), {**self.sources, **dict.fromkeys(values, Source("auto"))},
                              self.path)

    def value(self, dotted_key: str) -> Any:
        """The value of a dotted key."""
        at: Any = self.config
        for part in dotted_key.split("."):
            at = at[int(part)] if isinstance(at, list) else at[part] if isinstance(at, dict) else getattr(at, part)
        return at


@dataclass(frozen=True)
class ResolvedLoaded(LoadedConfig):
    """A loaded configuration with numbers in place of `auto`."""

    config: ResolvedConfig


def load_config(path: str | os.PathLike[str], words: Sequence[str] = ()) -> LoadedConfig:
    """Read, override and type-check a run's configuration. With `cluster: local` it is resolved.

    Args:
        path: the YAML file.
        words: overrides such as `run.steps=500`.

    Raises:
        UserError: with every unknown key (and the nearest valid one), missing key and wrong type at once, each with
            file and line or the override. `launch.config.checks` checks values against each other.
    """
    file = os.fspath(path)
    document = yaml_file.parse(typed_file.read_text(file, "configuration file", EXAMPLE), file)
    if not isinstance(document.values, dict):
        raise UserError("a run's configuration is a mapping of sections", where=f"{file}:1",
                        fix=f"start with `run:`; the sections are {', '.join(keys.members(()))}")
    problems = Problems(file)
    words_of: dict[Path, str] = {}
    for override in overrides.parse_overrides(words, problems):
        if overrides.apply(document.values, override, problems):
            depth = len(override.path)
            words_of = {path: word for path, word in words_of.items() if path[:depth] != override.path}
            words_of[override.path] = override.word
    locate = _Locator(file, document, words_of)
    config = typed_file.checked(RunConfig, document.values, locate.where, problems, special=_one_completion)
    sources = {keys.dotted(leaf): locate.source(leaf) for leaf, _ in leaves(config)}
    loaded = LoadedConfig(config, sources, file)
    return loaded.resolved(auto.local_values(config)) if config.cluster == "local" else loaded


def leaves(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Every (path, value) below a section, in the schema's order. Empty lists and mappings are leaves."""
    if isinstance(value, BaseModel):
        items: list = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list) and value:
        items = list(enumerate(value))
    else:
        return [(path, value)]
    return [leaf for name, inner in items for leaf in leaves(inner, (*path, name))]


class _Locator:
    """Finds the source of a path: the override that set it or a part around it, the file's line, or the default."""

    def __init__(self, file: str, document: yaml_file.Document, words_of: dict[Path, str]) -> None:
        self.file, self.values, self.lines, self.words_of = file, document.values, document.lines, words_of

    def source(self, path: Path) -> Source:
        if not self._is_given(path):  # also true for values in a section that an override replaced
            return Source("default")
        for end in range(len(path), 0, -1):
            word = self.words_of.get(path[:end])
            if word is not None:
                return Source("override", word=word)
        if path in self.lines:
            return Source("file", file=self.file, line=self.lines[path])
        return Source("default")

    def _is_given(self, path: Path) -> bool:
        at = self.values
        for part in path:
            if isinstance(at, dict) and part in at:
                at = at[part]
            elif isinstance(at, list) and isinstance(part, int) and part < len(at):
                at = at[part]
            else:
                return False
        return True

    def where(self, path: Path) -> str:
        """The nearest place in the user's input: the value itself or the section around it."""
        for end in range(len(path), -1, -1):
            source = self.source(path[:end])
            inside = [word for other, word in self.words_of.items() if other[:end] == path[:end] != ()]
            if source.kind == "default" and inside:
                source = Source("override", word=inside[0])
            if source.kind != "default":
                return f"{source}, {keys.dotted(path)}" if path else str(source)
        return f"{self.file}, {keys.dotted(path)}"


def _one_completion(key: str, error: dict[str, Any]) -> tuple[str, str] | None:
    if key != "algorithm.group_size" or error["type"] != "greater_than_equal":
        return None
    return (f"{key} = {error['input']!r}: with one completion per prompt there is no group to compare, so all "
            "advantages would be 0", "use 2 or more; 8 and 16 are common")
