"""Small real engines for tests: configuration, plan, placement, environment; and what Hugging Face says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launch import envvars
from launch.config.auto import on_this_machine
from launch.config.resolved import ResolvedConfig
from launch.config.schema import RunConfig
from launch.model.hf_config import from_hf_config
from launch.plan.plan import EnginePlacement, Placement, Plan, RankPlacement
from launch.planner.from_config import plan_of
from megatron_rl.data.batch import Prompt, Trajectory
from megatron_rl.rollout.engine import RolloutEngine


def run_config(model: Path, *, tp: int = 1, deterministic: bool = False, trainer: dict | None = None,
               staging: str = "in_place", **rollout) -> ResolvedConfig:
    return on_this_machine(RunConfig.model_validate({
        "run": {"name": "test", "steps": 1, "seed": 7},
        "model": {"path": str(model)},
        "trainer": {"dtype": "fp32", "optimizer": {"lr": 1e-3}, **(trainer or {})},
        "rollout": {"tp": tp, "dtype": "fp32", "max_prompt_tokens": 48, "max_new_tokens": 12, "kv_cache_gb": 0.25,
                    "max_num_seqs": 64, "deterministic": deterministic, **rollout},
        "weight_sync": {"staging": staging},
        "algorithm": {"group_size": 4, "prompts_per_step": 4},
        "reward": {"functions": [{"function": "exact_match"}]},
        "data": {"train": "unused.jsonl"},
    }))


def run_plan(config: ResolvedConfig) -> Plan:
    return plan_of(config, from_hf_config(Path(config.model.path)), "cpu")


def local_placement(made: Plan) -> Placement:
    return Placement(
        attempt=0, plan_fingerprint=made.fingerprint(), nodes=("here",), addresses={"here": "127.0.0.1"},
        training=tuple(RankPlacement(rank=r.rank, node="here", gpu=None, port=1) for r in made.training.ranks),
        rollout=tuple(EnginePlacement(replica=e.replica, node="here", gpus=()) for e in made.rollout.engines),
        master_port=1)


VOCABULARY = 1000
"""More token ids than any model of these tests has."""


def make_prompts(count: int, length: int = 9) -> list[Prompt]:
    """`count` different prompts of printable bytes."""
    rng = np.random.default_rng(count * 1000 + length)
    return [Prompt(i, rng.integers(40, 250, length).astype(np.int32), "", None, {}) for i in range(count)]


@contextmanager
def engine_environment(config: ResolvedConfig | None = None) -> Iterator[None]:
    """What the launcher sets before an engine's Python starts, for as long as the context lasts."""
    with pytest.MonkeyPatch.context() as patch:
        values = envvars.environment("rollout", "cpu", config or run_config(Path("unused")), job="tests")
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@contextmanager
def running_engine(config: ResolvedConfig, log: Path, replica: int = 0,
                   version_folder: Path | None = None) -> Iterator[tuple[asyncio.Runner, RolloutEngine]]:
    """A started engine and the event loop it lives on; stopped at the end, with nothing left running."""
    made = run_plan(config)
    with engine_environment(config), asyncio.Runner() as runner:
        engine = runner.run(RolloutEngine.start(config, made, local_placement(made), replica, log, version_folder))
        try:
            yield runner, engine
        finally:
            runner.run(engine.stop())


def hf_model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def hf_greedy(model: torch.nn.Module, prompt: Prompt, tokens: int, stop: Sequence[int] = (2,)) -> list[int]:
    """Greedy tokens up to `tokens` or the first stop token (included)."""
    ids = prompt.token_ids.tolist()
    while len(ids) - len(prompt.token_ids) < tokens:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(prompt.token_ids):]


@torch.no_grad()
def hf_logprobs(model: torch.nn.Module, prompt: Prompt, completion: Sequence[int], temperature: float) -> np.ndarray:
    """float64 log-probs of the completion's tokens at a temperature."""
    ids = torch.tensor([[*prompt.token_ids.tolist(), *completion]])
    logprobs_TV = (model(ids).logits[0].double() / temperature).log_softmax(-1)
    first = len(prompt.token_ids) - 1
    return np.array([logprobs_TV[first + i, token].item() for i, token in enumerate(completion)])


def assert_goes_on_with_the_new_weights(prompt: Prompt, trajectory: Trajectory, models: Sequence[torch.nn.Module],
                                        count: int) -> None:
    """A request that was running at a sync: its tokens so far are those of version 1, greedy on the first model, and it
    goes on from them with version 2, greedy on the second. The first `count` tokens of each are compared."""
    tokens, versions = trajectory.token_ids.tolist(), trajectory.weight_versions.tolist()
    assert versions == sorted(versions) and set(versions) == {1, 2}, "it did not run over the swap"
    old = versions.count(1)
    for which, start, end in ((0, 0, old), (1, old, len(tokens))):
        end = min(end, start + count)
        before = replace(prompt, token_ids=np.array([*prompt.token_ids, *tokens[:start]], dtype=np.int32))
        assert tokens[start:end] == hf_greedy(models[which], before, end - start)
