"""Keys that may be `auto`: which they are, what they are on this machine, and how choices are put in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from launch.config.schema import RunConfig, Section, Trainer

LOCAL: dict[str, Any] = {
    "trainer.tp": 1, "trainer.pp": 1, "trainer.vpp": 1, "trainer.cp": 1, "trainer.dp": 1,
    "trainer.sequence_parallel": False, "trainer.recompute": "none", "rollout.replicas": 1, "rollout.tp": 1,
    "rollout.max_num_seqs": 256, "placement.training_nodes": 1, "placement.mode": "disaggregated"}
"""Dotted key -> its value on this machine. `trainer.token_budget` is not a constant: see `token_budget`."""
KEYS = (*LOCAL, "trainer.token_budget")
TOKEN_BUDGET = 8192


def open_keys(config: RunConfig) -> tuple[str, ...]:
    """The keys that are still `auto`."""
    return tuple(key for key in KEYS if value(config, key) == "auto")


def value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def token_budget(config: RunConfig, multiple: int = 1) -> int:
    """8192, or the longest sequence where that is longer, rounded up to `multiple`."""
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    return round_up(max(TOKEN_BUDGET, longest), multiple)


def local_values(config: RunConfig) -> dict[str, Any]:
    """What the open keys are on this machine."""
    values = {key: LOCAL[key] for key in open_keys(config) if key in LOCAL}
    if value(config, "trainer.token_budget") == "auto":
        sizes = with_values(config, values).trainer
        values["trainer.token_budget"] = token_budget(
            config, sequence_multiple(sizes.tp, sizes.cp, sizes.sequence_parallel))
    return values


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy with these values, by dotted key."""
    for key, new in values.items():
        config = _with_value(config, key.split("."), new)
    return config


def _with_value(section: Section, path: Sequence[str], new: Any) -> Any:
    name, *rest = path
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, new) if rest else new})


def can_share_prompts(trainer: Trainer, device: Literal["cpu", "gpu"]) -> bool:
    """Whether a micro-batch may hold a prompt once for several completions: the attention must know documents with a
    common beginning, and each prediction must be free to choose its row of the logits (`trainer.share_prompts`)."""
    return device == "cpu" and trainer.cp == 1 and not trainer.sequence_parallel


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def sequence_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """What each sequence's length is padded to a multiple of: 2 CP for the zig-zag split over CP > 1 ranks, times TP
    when sequence parallelism splits each of those parts over TP."""
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)
