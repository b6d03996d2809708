"""Configuration, plan and placement of small engines, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launch.config.schema import RunConfig
from launch.planner.architecture import from_hf_config
from launch.planner.build import plan
from launch.planner.plan import EnginePlacement, Placement, Plan, RankPlacement
from megatron_rl.data.batch import Prompt


def run_config(model: Path, *, tp: int = 1, deterministic: bool = False, trainer: dict | None = None,
               **rollout) -> RunConfig:
    return RunConfig.model_validate({
        "run": {"name": "test", "steps": 1, "seed": 7},
        "model": {"path": str(model)},
        "trainer": {"dtype": "fp32", "optimizer": {"lr": 1e-3}, **(trainer or {})},
        "rollout": {"tp": tp, "dtype": "fp32", "max_prompt_tokens": 48, "max_new_tokens": 12, "kv_cache_gb": 0.25,
                    "max_num_seqs": 64, "deterministic": deterministic, **rollout},
        "algorithm": {"group_size": 4, "prompts_per_step": 4},
        "reward": {"functions": [{"function": "exact_match"}]},
        "data": {"train": "unused.jsonl"},
    })


def run_plan(config: RunConfig) -> Plan:
    return plan(config, from_hf_config(Path(config.model.path)), "cpu")


def local_placement(made: Plan) -> Placement:
    return Placement(
        attempt=0, plan_fingerprint=made.fingerprint(), nodes=("here",), addresses={"here": "127.0.0.1"},
        training=tuple(RankPlacement(rank=r.rank, node="here", gpu=None, port=1) for r in made.training.ranks),
        rollout=tuple(EnginePlacement(replica=e.replica, node="here", gpus=()) for e in made.rollout.engines),
        master_port=1)


def make_prompts(count: int, length: int = 9) -> list[Prompt]:
    """`count` different prompts of printable bytes."""
    rng = np.random.default_rng(count * 1000 + length)
    return [Prompt(i, rng.integers(40, 250, length).astype(np.int32), "", None, {}) for i in range(count)]
