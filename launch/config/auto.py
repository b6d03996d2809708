"""Values of `auto` on this machine."""

from __future__ import annotations

from typing import Any, Literal

from launch.config.resolved import ResolvedConfig, open_keys, resolve
from launch.config.schema import RunConfig, Trainer
from launch.model.padding import sequence_multiple, token_budget

MAX_NUM_SEQS = 256
"""`rollout.max_num_seqs` without a search."""
LOCAL: dict[str, Any] = {
    "trainer.tp": 1, "trainer.pp": 1, "trainer.vpp": 1, "trainer.cp": 1, "trainer.dp": 1,
    "trainer.sequence_parallel": False, "trainer.recompute": "none", "rollout.replicas": 1, "rollout.tp": 1,
    "rollout.max_num_seqs": MAX_NUM_SEQS, "placement.training_nodes": 1, "placement.mode": "disaggregated",
    "algorithm.max_staleness": 0}
"""Dotted key -> value. `trainer.token_budget` is not a constant, see `local_values`."""


def local_values(config: RunConfig) -> dict[str, Any]:
    """Values of the open keys on this machine, by dotted key."""
    values = {key: LOCAL[key] for key in open_keys(config) if key in LOCAL}
    trainer, rollout = config.trainer, config.rollout
    if trainer.token_budget == "auto":
        tp, cp, sequence_parallel = (_number(trainer, name) for name in ("tp", "cp", "sequence_parallel"))
        values["trainer.token_budget"] = token_budget(rollout.max_prompt_tokens + rollout.max_new_tokens,
                                                      sequence_multiple(tp, cp, sequence_parallel))
    return values


def _number(trainer: Trainer, name: str) -> Any:
    given = getattr(trainer, name)
    return LOCAL[f"trainer.{name}"] if given == "auto" else given


def on_this_machine(config: RunConfig) -> ResolvedConfig:
    """The configuration with `local_values`."""
    return resolve(config, local_values(config))


def can_share_prompts(cp: int, sequence_parallel: bool, device: Literal["cpu", "gpu"]) -> bool:
    """Whether a micro-batch may hold a prompt once for several completions (`trainer.share_prompts`). The attention
    must support documents with a shared prefix, and several predictions must be able to use one row of the logits."""
    return device == "cpu" and cp == 1 and not sequence_parallel
