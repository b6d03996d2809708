"""All keys of the schema, with nearest names and types in words for messages and docs."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launch.config.schema import RunConfig
from launch.config.yaml_file import Path


@dataclass(frozen=True)
class Key:
    """One key of the schema. List items appear as `*`: `reward.functions.*.weight`."""

    dotted: str
    field: FieldInfo
    section: type[BaseModel] | None
    """The section class that the key opens, or None for a value."""

    @property
    def is_union(self) -> bool:
        return typing.get_origin(self.field.annotation) in (typing.Union, types.UnionType)


def all_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every key of the schema in the order of `schema.py`, sections before their members."""
    for name, field in section.model_fields.items():
        inner, is_list = _section_of(field.annotation)
        yield Key(prefix + name, field, inner)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.{'*.' if is_list else ''}")


SYNONYMS = {
    "learning_rate": "lr", "tensor_parallel_size": "tp", "tensor_model_parallel_size": "tp",
    "pipeline_parallel_size": "pp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "data_parallel_size": "dp", "virtual_pipeline_model_parallel_size": "vpp", "precision": "dtype",
    "max_tokens_per_micro_batch": "token_budget", "recompute_granularity": "recompute",
    "num_generations": "group_size", "n_samples_per_prompt": "group_size", "train_batch_size": "prompts_per_step",
    "max_tokens": "max_new_tokens", "max_response_length": "max_new_tokens",
    "max_completion_length": "max_new_tokens", "max_prompt_length": "max_prompt_tokens",
    "gpu_memory_utilization": "memory_utilization", "kl_coef": "beta", "entropy_coeff": "entropy_coef",
    "save_interval": "every", "max_steps": "steps", "total_training_steps": "steps"}
"""Name in another framework -> last part of our key."""


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def pattern(path: Path) -> str:
    """A path in the form of `Key.dotted`, with `*` for a list index."""
    return ".".join("*" if isinstance(part, int) else part for part in path)


def nearest(path: Path, model: type[BaseModel] = RunConfig) -> str | None:
    """The key of `model` that the user most likely meant by an unknown `path`, or None.

    The first match counts: a sibling with a similar name, a key of the same name in another section, any key with a
    similar name.
    """
    wanted, parent = str(path[-1]), path[:-1]
    wanted = SYNONYMS.get(wanted, wanted)
    section = pattern(parent)
    keys = [key.dotted for key in all_keys(model)]
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.7)
    if close:
        return dotted((*parent, close[0]))
    same_name = [key for key in keys if key.rpartition(".")[2] == wanted]
    if same_name:
        return same_name[0].replace("*", "0")
    close = difflib.get_close_matches(dotted((*parent, wanted)), keys, n=1, cutoff=0.8)
    if close:
        return close[0].replace("*", "0")
    by_name = {key.rpartition(".")[2]: key for key in keys}
    close = difflib.get_close_matches(wanted, by_name, n=1, cutoff=0.75)
    return by_name[close[0]].replace("*", "0") if close else None


def members(path: Path, model: type[BaseModel] = RunConfig) -> list[str]:
    """Names of the keys inside the section at `path`; empty if it is not a section."""
    section = pattern(path)
    return [key.dotted.rpartition(".")[2] for key in all_keys(model) if key.dotted.rpartition(".")[0] == section]


def type_in_words(field: FieldInfo) -> str:
    """The type for docs and messages: `integer >= 1`, `one of cpu, gpu`, `number or null`."""
    return _words(field.annotation, field.metadata)


def as_written(value: object) -> str:
    """A value in YAML (`null` and `true`, not None and True), shortened to 60 characters."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    if isinstance(value, (list, dict)):
        text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False, allow_unicode=True).strip()
    return text if len(text) <= 60 else text[:57] + "..."


_NAMES: dict[object, str] = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null",
                             dict: "mapping"}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def _words(annotation: object, metadata: typing.Sequence[object] = ()) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _words(args[0], [*args[1:], *metadata])
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args)) if len(args) > 1 else str(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(arg, () if arg is type(None) else metadata) for arg in args)
    if origin is list:
        least = [least for item in metadata if (least := getattr(item, "min_length", None)) is not None]
        inner = _words(args[0])
        many = f"list, each {inner}" if inner.startswith("one of") else f"list of {inner}s"
        return many + (f", at least {least[0]}" if least else "")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = _NAMES.get(origin or annotation, "value")
    bounds = [f"{sign} {getattr(item, attribute)}" for item in metadata for attribute, sign in _BOUNDS
              if getattr(item, attribute, None) is not None]
    patterns = [f"matching {pattern}" for item in metadata if (pattern := getattr(item, "pattern", None))]
    return " ".join([name, " and ".join(bounds), *patterns]).strip().replace("  ", " ")


def _section_of(annotation: object) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if typing.get_origin(annotation) is list:
        inner, _ = _section_of(typing.get_args(annotation)[0])
        return inner, inner is not None
    return None, False
