"""Gradients that are reduced behind the backward pass, parameters that are gathered behind the forward pass, and weight
gradients that the product itself accumulates: the same weights as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from megatron.core.tensor_parallel import layers as megatron_layers

from launch.config.resolved import ResolvedConfig
from megatron_rl.driver.actors import TrainerActor
from megatron_rl.trainer import optimizer as optimizer_module
from megatron_rl.trainer.model import named_parameters
from megatron_rl.trainer.trainer import MegatronTrainer
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import assert_gradients_equal, make_plan
from tests.trainer.runs import assert_same_bits, batches, config_of, keep_next_gradient, start, whole_model

BUCKET = 15_000
"""Parameters of a bucket: several in the tiny model."""
NOT_BEHIND = {"overlap_grad_reduce": False}


@dataclass
class Seen:
    """The collectives of a rank over its buckets, in order."""

    reduces: list[bool] = field(default_factory=list)
    """Whether each began inside of a backward pass."""
    gathers: list[bool] = field(default_factory=list)
    """Whether each began in a forward pass."""


@contextmanager
def _watched() -> Iterator[Seen]:
    seen = Seen()
    reduce, gather = BucketGroup.start_grad_sync, BucketGroup.start_param_sync

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        before = self.grad_reduce_handle
        reduce(self, *args, **kwargs)
        if self.grad_reduce_handle is not before:
            seen.reduces.append(torch._C._current_graph_task_id() != -1)

    def start_param_sync(self, force_sync: bool = False) -> None:
        seen.gathers.append(not force_sync)
        gather(self, force_sync)

    BucketGroup.start_grad_sync, BucketGroup.start_param_sync = start_grad_sync, start_param_sync
    try:
        yield seen
    finally:
        BucketGroup.start_grad_sync, BucketGroup.start_param_sync = reduce, gather


@dataclass
class Trained:
    whole: list[dict[str, np.ndarray] | None]
    """The model after each step."""
    own: dict[str, np.ndarray]
    """The rank's parameters after an update that another one follows."""
    seen: list[Seen]
    buckets: int
    refused: list[str]
    """What reads the weights before they are gathered."""


def _train(rank: Rank, config: ResolvedConfig) -> Trained:
    """Three steps: two updates; three parts; two parts, and no more at the update."""
    optimizer_module.DistributedDataParallelConfig = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    trainer = start(rank, config)
    trainer.load_initial_weights()
    each, whole, seen = iter(batches(trainer.plan.architecture.vocab, 7)), [], []

    def of_step(step: Callable[[], None]) -> None:
        with _watched() as watched:
            step()
        seen.append(watched)

    def first() -> None:
        trainer.update(next(each), 0, more=True)

    def parts(count: int) -> None:
        for _ in range(count):
            trainer.accumulate(next(each))

    of_step(first)
    own = {name: parameter.numpy().copy() for name, parameter in named_parameters(trainer._chunks).items()}
    refused = _refused(trainer)
    of_step(lambda: trainer.update(next(each), 1) and None)
    whole.append(whole_model(trainer))
    of_step(lambda: (parts(2), trainer.update(next(each))) and None)
    whole.append(whole_model(trainer))
    of_step(lambda: (parts(2), trainer.update(None)) and None)
    whole.append(whole_model(trainer))
    return Trained(whole, own, seen, sum(len(chunk.bucket_groups) for chunk in trainer.optimizer.chunks), refused)


def _refused(trainer: MegatronTrainer) -> list[str]:
    actor: Any = object.__new__(TrainerActor)       # without the files of an attempt
    actor.name, actor.attempt, actor.trainer = "trainer-0", None, trainer
    actor.sender = SimpleNamespace(sync_send=lambda epoch: None)
    readers = {"sync_send": lambda: actor.sync_send(0), "parameters": trainer.parameters}
    if not trainer.optimizer.whole:     # they would write
        readers |= {"save": lambda: trainer.save("never/step-000001", {}),
                    "export": lambda: trainer.export("never", "write")}
    refused = []
    for name, read in readers.items():
        try:
            read()
        except RuntimeError as error:
            assert "more=True" in str(error)
            refused.append(name)
    return refused


LAYOUTS = {
    "tp2-dp2": ({}, {"tp": 2, "dp": 2}),
    "pp2-vpp2-dp2-tied": ({"tie_word_embeddings": True}, {"pp": 2, "vpp": 2, "dp": 2, "token_budget": 32}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_behind_compute_change_no_bit(layout: str, tmp_path) -> None:
    model, sizes = LAYOUTS[layout]
    folder = make_tiny(tmp_path, "qwen3", num_hidden_layers=4, **model)
    # Without clipping: the norm is a sum over shards, whose borders are those of the buckets.
    settings = {"token_budget": 48, **sizes, "optimizer": {"clip_grad": 0.0}}
    behind, plain = (run_ranks(4, _train, config_of(folder, **settings, **how)) for how in ({}, NOT_BEHIND))
    for found, expected in zip(behind[0].whole, plain[0].whole, strict=True):
        assert_same_bits(found, expected)
    for rank, without in zip(behind, plain, strict=True):
        first, second, parts, none_left = rank.seen
        assert not any(first.reduces), "Megatron learns in its first step how often each gradient is ready"
        assert second.reduces == [True] * rank.buckets == parts.reduces, "once, in the last backward pass"
        assert none_left.reduces == [False] * rank.buckets, "no pass was known to be the last"
        assert second.gathers == [True] * rank.buckets + [False] * rank.buckets, "behind the forward; at the end"
        assert not any(parts.gathers) and len(parts.gathers) == rank.buckets
        # What a weight sync would have sent there. Without the refusal the engines would serve old weights.
        stale = [name for name in rank.own if not np.array_equal(rank.own[name], without.own[name])]
        assert stale and rank.refused == ["sync_send", "parameters", "save", "export"]
        assert without.refused == []
        assert not any(without.seen[1].reduces) and len(without.seen[1].gathers) == without.buckets
    assert behind[0].buckets > len(plain[0].whole), "several buckets"


def test_without_the_distributed_optimizer_only_gradients_overlap(tmp_path) -> None:
    folder = make_tiny(tmp_path, num_hidden_layers=2)
    settings = {"token_budget": 48, "dp": 2, "distributed_optimizer": False, "optimizer": {"clip_grad": 0.0}}
    behind, plain = (run_ranks(2, _train, config_of(folder, **settings, **how)) for how in ({}, NOT_BEHIND))
    for found, expected in zip(behind[0].whole, plain[0].whole, strict=True):
        assert_same_bits(found, expected)
    assert all(behind[0].seen[1].reduces) and not behind[0].seen[1].gathers and not behind[0].refused


def _fused(rank: Rank, config: ResolvedConfig) -> tuple[Any, int]:
    """The gradient of a batch in two parts, and the calls of the fused product."""
    calls = []

    def add_product(input_TI: torch.Tensor, gradient_TO: torch.Tensor, accumulated_OI: torch.Tensor) -> None:
        calls.append(accumulated_OI.shape)
        accumulated_OI.addmm_(gradient_TO.t(), input_TI)

    if config.trainer.gradient_accumulation_fusion is True:
        megatron_layers._grad_accum_fusion_available = True
        megatron_layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    trainer = start(rank, config)
    trainer.load_initial_weights()
    gradient, rows = keep_next_gradient(trainer), batches(trainer.plan.architecture.vocab, 2)
    trainer.accumulate(rows[0])
    trainer.update(rows[1])
    return gradient[0], len(calls)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_that_the_product_accumulates_are_the_same(tmp_path, tied: bool) -> None:
    """Everything of Megatron's around the kernel, which is CUDA's: a product in torch stands for it."""
    folder = make_tiny(tmp_path, num_hidden_layers=2, tie_word_embeddings=tied)
    (fused, calls), *_ = run_ranks(2, _fused, config_of(folder, dp=2, token_budget=48,
                                                        gradient_accumulation_fusion=True))
    (plain, none), *_ = run_ranks(2, _fused, config_of(folder, dp=2, token_budget=48))
    assert_gradients_equal(fused, plain, rtol=1e-5)
    assert calls >= 2 * (2 * 4 + 1) and none == 0, "four matrices a layer and the head, in each micro-batch"


def test_the_fusion_without_its_kernels_is_one_clear_error(tmp_path) -> None:
    config = config_of(make_tiny(tmp_path), gradient_accumulation_fusion=True)
    assert make_plan(config).training.world_size == 1
    with pytest.raises(AssertionError, match="fused_weight_gradient_mlp_cuda"):
        run_ranks(1, _fused_without_kernels, config)


def _fused_without_kernels(rank: Rank, config: ResolvedConfig) -> None:
    start(rank, config)
