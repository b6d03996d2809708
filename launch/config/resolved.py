"""`ResolvedConfig`: a run's configuration whose sizes are numbers.

In a `RunConfig`, as the user writes it, a size may be `auto` (an open key). Code that runs, reads, checks or times a
run takes a `ResolvedConfig`. Only `resolve` makes one, from a `RunConfig` and values for its open keys. The classes
here give the resolved type of each key that may be open and inherit all other keys from the schema.

Six keys keep `auto`, because it names a rule that is applied later: `run.resume`, `run.stop_margin_s`,
`trainer.share_prompts`, `trainer.overlap_param_gather`, `trainer.gradient_accumulation_fusion` and `weight_sync.route`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from launch.config.schema import Algorithm, Placement, Rollout, RunConfig, Section, Trainer


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


class ResolvedAlgorithm(Algorithm):
    max_staleness: NonNegativeInt


class ResolvedPlacement(Placement):
    training_nodes: PositiveInt
    mode: Literal["disaggregated", "colocated", "hybrid"]


class ResolvedConfig(RunConfig):
    trainer: ResolvedTrainer
    rollout: ResolvedRollout
    algorithm: ResolvedAlgorithm
    placement: ResolvedPlacement


KEYS = tuple(f"{section}.{name}" for section, resolved in (
    ("trainer", ResolvedTrainer), ("rollout", ResolvedRollout), ("algorithm", ResolvedAlgorithm),
    ("placement", ResolvedPlacement))
    for name in resolved.__annotations__)
"""Dotted keys that may be open: `auto` in a `RunConfig`."""


def open_keys(config: RunConfig) -> tuple[str, ...]:
    """The keys that are `auto`."""
    return tuple(key for key in KEYS if value(config, key) == "auto")


def resolve(config: RunConfig, chosen: Mapping[str, Any]) -> ResolvedConfig:
    """The configuration with these values, by dotted key.

    Raises:
        ValueError: a key is still open, or a value is not valid for its key.
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
