"""`ResolvedConfig`: a run's configuration whose sizes are numbers.

`RunConfig` is what a user writes: a size may be `auto`. What runs, reads, checks and times a run takes a
`ResolvedConfig`, which `resolve` alone makes, from a `RunConfig` and the values of its open keys. The classes here say
of each key that may be open what it is once it is not; every other key is inherited from the schema.

Four keys keep their `auto`, because they name a rule that is applied where it is needed: `run.resume`,
`run.stop_margin_s`, `trainer.share_prompts` and `weight_sync.route`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import PositiveInt

from launch.config.schema import Placement, Rollout, RunConfig, Section, Trainer


class ResolvedTrainer(Trainer):
    tp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt
    cp: PositiveInt
    dp: PositiveInt
    sequence_parallel: bool
    recompute: Literal["none", "selective", "full"]
    token_budget: PositiveInt


class ResolvedRollout(Rollout):
    replicas: PositiveInt
    tp: PositiveInt
    max_num_seqs: PositiveInt


class ResolvedPlacement(Placement):
    training_nodes: PositiveInt
    mode: Literal["disaggregated", "colocated", "hybrid"]


class ResolvedConfig(RunConfig):
    trainer: ResolvedTrainer
    rollout: ResolvedRollout
    placement: ResolvedPlacement


KEYS = tuple(f"{section}.{name}" for section, resolved in (
    ("trainer", ResolvedTrainer), ("rollout", ResolvedRollout), ("placement", ResolvedPlacement))
    for name in resolved.__annotations__)
"""Dotted keys that may be open: `auto` in a `RunConfig`."""


def open_keys(config: RunConfig) -> tuple[str, ...]:
    """The keys that are `auto`."""
    return tuple(key for key in KEYS if value(config, key) == "auto")


def resolve(config: RunConfig, chosen: Mapping[str, Any]) -> ResolvedConfig:
    """The configuration with these values, by dotted key.

    Raises:
        ValueError: a key is left open, or a value is not one that its key takes.
    """
    return ResolvedConfig.model_validate(with_values(config, chosen).model_dump())


def value(config: RunConfig, key: str) -> Any:
    """The value of a dotted key in a section."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy with these values, by dotted key."""
    for key, new in values.items():
        config = _with_value(config, key.split("."), new)
    return config


def _with_value(section: Section, path: Sequence[str], new: Any) -> Any:
    name, *rest = path
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, new) if rest else new})
