"""Shared by the tests of the trainer as a whole: configurations, real ranks, the whole model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch.config.auto import on_this_machine
from launch.config.resolved import ResolvedConfig
from launch.config.schema import RunConfig
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.trainer import parallel
from megatron_rl.trainer.fixed_logprobs import Model
from megatron_rl.trainer.trainer import MegatronTrainer
from tests.ranks import Rank
from tests.trainer.harness import gather, gather_gradients, make_batch, make_plan, of_batch, run_config

LENGTHS = [9, 23, 5, 16, 12, 7]


def config_of(folder: Path | str, *, run: dict | None = None, model: dict | None = None,
              algorithm: dict | None = None, checkpoint: dict | None = None, **trainer) -> ResolvedConfig:
    """A configuration with a learning rate that changes at every step."""
    optimizer = {"lr": 1e-2, "schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1, "clip_grad": 0.5,
                 **trainer.pop("optimizer", {})}
    values = run_config(folder, optimizer=optimizer, **trainer).model_dump()
    for section, keys in (("run", {"steps": 10, **(run or {})}), ("model", model), ("checkpoint", checkpoint),
                          ("algorithm", {"importance_cap": None, **(algorithm or {})})):
        values[section].update(keys or {})
    return on_this_machine(RunConfig.model_validate(values))


def start(rank: Rank, config: ResolvedConfig, device: Literal["cpu", "gpu"] = "cpu") -> MegatronTrainer:
    """Join the group and build the trainer; weights are not loaded yet."""
    plan = make_plan(config, device)
    parallel.initialise(plan, rank.rank, rank.address, rank.port, rank.timeout_s)
    return MegatronTrainer(config, plan, rank.rank)


def logprobs(trainer: MegatronTrainer, batch: PolicyBatch, model: Model = "policy") -> np.ndarray:
    """Log-probs of the whole batch, float32 [N] on every rank. Collective."""
    return of_batch(trainer.logprobs(batch, model), trainer.plan, batch)


def batches(vocab: int, count: int, first: int = 0) -> list[PolicyBatch]:
    """Different batches. Equal arguments give equal batches."""
    return [make_batch(LENGTHS, vocab, seed=seed) for seed in range(first, first + count)]


def whole_model(trainer: MegatronTrainer) -> dict[str, np.ndarray] | None:
    """On rank 0 every Hugging Face tensor of the model, as float32; copies on several ranks must be equal."""
    return gather(trainer.parameters(), trainer.layout(), trainer.plan, 0.0)


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not np.array_equal(found[name], expected[name])]
    assert not different, f"{len(different)} tensors differ: {different[:3]}"


def worst_difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


def poison_next_gradient(trainer: MegatronTrainer, value: float) -> None:
    """Overwrite the gradients of one rank when the next backward pass is done, as an overflow would."""
    megatron = trainer.optimizer.megatron
    prepare_grads = megatron.prepare_grads

    def poisoned() -> bool:
        megatron.prepare_grads = prepare_grads
        if dist.get_rank() == 0:
            for parameter in trainer.optimizer.chunks[0].parameters():
                parameter.main_grad.fill_(value)
        return prepare_grads()

    megatron.prepare_grads = poisoned


def keep_next_gradient(trainer: MegatronTrainer) -> list[dict[str, np.ndarray] | None]:
    """A list that the next update appends the whole model's gradient to, before clipping (None past rank 0)."""
    kept: list[dict[str, np.ndarray] | None] = []
    megatron = trainer.optimizer.megatron
    prepare_grads = megatron.prepare_grads

    def keep() -> bool:
        megatron.prepare_grads = prepare_grads
        if trainer.config.trainer.distributed_optimizer:
            _gather_shards(trainer)
        parameters = {f"chunk{i}.{name}": parameter for i, chunk in enumerate(trainer.optimizer.chunks)
                      for name, parameter in chunk.module.named_parameters()}
        kept.append(gather_gradients(parameters, trainer.layout(), trainer.plan))
        return prepare_grads()

    megatron.prepare_grads = keep
    return kept


def _gather_shards(trainer: MegatronTrainer) -> None:
    """The distributed optimizer leaves each rank of a DP x CP group its share of the sum: put the shares together."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for bucket in (bucket for chunk in trainer.optimizer.chunks for buffer in chunk.buffers
                   for bucket in buffer.buckets):
        mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def moments_of(trainer: MegatronTrainer) -> list[torch.Tensor]:
    """Adam's state on this rank, in a fixed order."""
    (part,) = trainer.optimizer.parts
    states = part.optimizer.state_dict()["state"]
    return [states[i][key] for i in sorted(states) for key in ("exp_avg", "exp_avg_sq", "step")]
