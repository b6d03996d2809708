"""Operations for which the host would wait for a GPU: none in a micro-batch, and a few in a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from launch.config.resolved import ResolvedConfig
from megatron_rl.trainer.trainer import MegatronTrainer
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import make_plan
from tests.trainer.runs import batches, config_of, start

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
           aten.is_nonzero.default, aten._unique2.default, aten.repeat_interleave.Tensor, aten.bincount.default}
"""`.item()`, `bool(...)`, and results of a size that only the device knows."""
RECIPES = {
    "all that counts and corrects": {
        "old_logprobs": "recompute", "kl": {"beta": 0.1}, "entropy_coef": 0.01, "loss": "gspo", "dual_clip": 3.0,
        "importance_weight": "sequence", "importance_cap": 2.0, "rejection": {"rule": "geometric"}},
    "on-policy": {"rejection": {"rule": "icepop"}, "importance_cap": 2.0},
}


class Waits(TorchDispatchMode):
    """Counts these operations, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if func in WAITING or by_mask:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _step(trainer: MegatronTrainer) -> dict[str, Any]:
    trainer.load_initial_weights()
    (batch,) = batches(trainer.plan.architecture.vocab, 1)
    with Waits() as passes:
        if trainer.config.algorithm.old_logprobs == "recompute":
            trainer.keep_logprobs(batch, "policy")
            trainer.keep_logprobs(batch, "reference")
    with Waits() as update:
        metrics = trainer.update(batch)
    return {"micro-batches": metrics["train/microbatches"], "passes": passes.counts, "update": update.counts}


def _steps(rank: Rank, configs: list[ResolvedConfig]) -> list[dict[str, Any]]:
    first, *others = configs
    return [_step(start(rank, first)),
            *(_step(MegatronTrainer(config, make_plan(config), rank.rank)) for config in others)]


def test_no_micro_batch_makes_the_host_wait(tmp_path) -> None:
    model = make_tiny(tmp_path, num_hidden_layers=1)
    configs = [config_of(model, token_budget=budget, algorithm=recipe) for recipe in RECIPES.values()
               for budget in (1000, 23)]
    (found,) = run_ranks(1, _steps, configs)
    for name, few, many in zip(RECIPES, found[::2], found[1::2], strict=True):
        assert (few["micro-batches"], many["micro-batches"]) == (1, 3), name
        assert few["update"] == many["update"], name
        assert few["update"].keys() == {"aten._local_scalar_dense.default"}, "metrics, gradient norm, Adam's step"
        assert not few["passes"] and not many["passes"], name
