"""Real gloo ranks, Hugging Face as the truth: what a training step's log-probs and gradients must equal, whatever the
layout, the packing and the number of micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from launch.config.resolved import ResolvedConfig
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.packing import pack
from megatron_rl.data.schedule import make_schedule
from megatron_rl.trainer import packed_attention, step
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import (
    TrainingRank,
    assert_gradients_equal,
    hugging_face,
    make_batch,
    make_groups,
    make_plan,
    reinforce,
    run_config,
)

VOCAB, TEMPERATURE = 320, 0.7
MIXED = [17, 40, 9, 33, 5, 61, 1, 2, 22]
UNEQUAL = [95] * 5 + [20] * 5
GROUPS = [(12, [5, 9, 1, 14]), (1, [3, 1, 6, 2]), (30, [1, 1, 2, 1]), (7, [20, 17, 33, 8]), (9, [4]), (3, [0, 2])]
"""Prompts and completions of one token, a group of one, an empty completion that comes first."""
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
NEMO = {"family": "mistral", "head_dim": 64}
OLMO2 = {"family": "olmo2"}
WIDE_HEADS = {"family": "qwen3", "head_dim": 64, "tie_word_embeddings": True}


def _with_maximum(**tensors) -> tuple[torch.Tensor, dict]:
    loss, sums = reinforce(**tensors)
    return loss, {**sums, "advantage_max": (tensors["weights_T"] * tensors["advantages_T"]).max()}


def _step(rank: Rank, config: ResolvedConfig, batch: PolicyBatch) -> tuple:
    training = TrainingRank(rank, config)
    before = training.logprobs(batch, TEMPERATURE)
    training.zero_grad()
    metrics = step.run_step(training.chunks, training.plan, batch, _with_maximum, TEMPERATURE)
    return before, metrics, training.gradients()


class Models:
    """Model folders and Hugging Face's answers, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._truths: dict[str, tuple] = {}

    def folder(self, model: dict) -> Path:
        key = repr(model)
        if key not in self._folders:
            self._folders[key] = make_tiny(self._root / str(len(self._folders)), **model)
        return self._folders[key]

    def truth(self, model: dict, lengths: list) -> tuple:
        key = repr((model, lengths))
        if key not in self._truths:
            self._truths[key] = hugging_face(self.folder(model), batch_of(lengths), TEMPERATURE)
        return self._truths[key]


def batch_of(lengths: list) -> PolicyBatch:
    """Of sequences of these lengths, or of groups."""
    return (make_batch if isinstance(lengths[0], int) else make_groups)(lengths, VOCAB)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


CASES = {
    "tp2-pp2": ({}, {"tp": 2, "pp": 2}, MIXED),
    "tp2-pp2-sp-tied": ({"tie_word_embeddings": True}, {"tp": 2, "pp": 2, "sequence_parallel": True}, MIXED),
    "tp2-sp-dp2-qwen3-head-dim": (WIDE_HEADS, {"tp": 2, "sequence_parallel": True, "dp": 2}, MIXED),
    "pp2-vpp2-qwen2-tied": ({"family": "qwen2", "num_hidden_layers": 4, "tie_word_embeddings": True},
                            {"pp": 2, "vpp": 2, "token_budget": 64}, MIXED),
    "pp2-vpp2-lengths-too-unequal-to-pad": ({"num_hidden_layers": 4}, {"pp": 2, "vpp": 2}, [120, 110, 100, 6]),
    "pp2-dp2-lengths-too-unequal-to-pad": ({}, {"pp": 2, "dp": 2}, [120, 70, 69, 68, 67]),
    "pp2-uneven-layers-full-recompute": ({"num_hidden_layers": 3}, {"pp": 2, "recompute": "full"}, UNEQUAL),
    "one-rank-mistral-head-dim": (NEMO, {"token_budget": 1000}, MIXED),
    "tp2-sp-pp2-mistral-head-dim": (NEMO, {"tp": 2, "pp": 2, "sequence_parallel": True}, MIXED),
    "one-rank-olmo2": (OLMO2, {"token_budget": 1000}, MIXED),
    "tp2-pp2-olmo2-full-recompute": (OLMO2, {"tp": 2, "pp": 2, "recompute": "full"}, MIXED),
    "tp2-sp-cp2-olmo2": (OLMO2, {"tp": 2, "sequence_parallel": True, "cp": 2}, MIXED),
    "shared-tp2-olmo2": (OLMO2, {"tp": 2}, GROUPS),
    "cp2-llama3-rope": ({"rope_parameters": LLAMA3}, {"cp": 2}, MIXED),
    "cp2-tp2-sp-selective-recompute-qwen2": ({"family": "qwen2"}, {"cp": 2, "tp": 2, "sequence_parallel": True,
                                                                   "recompute": "selective"}, MIXED),
    "cp2-pp2-qwen3-tied-full-recompute": (WIDE_HEADS, {"cp": 2, "pp": 2, "recompute": "full"}, MIXED),
    "one-rank-one-micro-batch-linear-rope": ({"rope_parameters": LINEAR}, {"token_budget": 1000}, UNEQUAL),
    "one-rank-one-sequence-a-micro-batch": ({}, {"token_budget": 95}, UNEQUAL),
    "dp2-cp2": ({}, {"dp": 2, "cp": 2}, UNEQUAL),
    "dp2-selective-recompute": ({}, {"dp": 2, "recompute": "selective"}, UNEQUAL),
    "dp2-fewer-sequences-than-ranks": ({}, {"dp": 2, "pp": 2}, [30]),
    "shared-one-micro-batch": ({}, {"token_budget": 1000}, GROUPS),
    "shared-groups-over-the-budget-qwen2-full-recompute": ({"family": "qwen2"},
                                                           {"token_budget": 45, "recompute": "full"}, GROUPS),
    "shared-tp2-pp2-qwen3-tied": (WIDE_HEADS, {"tp": 2, "pp": 2, "token_budget": 64}, GROUPS),
    "shared-pp2-vpp2-too-unequal-to-pad": ({"num_hidden_layers": 4}, {"pp": 2, "vpp": 2},
                                           [(40, [60, 2, 1]), (4, [3])]),
    "shared-dp2-one-group": ({}, {"dp": 2}, [(10, [9, 13, 4, 11, 8])]),
    "groups-tp2-sp": ({}, {"tp": 2, "sequence_parallel": True}, GROUPS),
    "groups-cp2": ({}, {"cp": 2}, GROUPS),
}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_gradients_equal_hugging_face(case: str, models: Models) -> None:
    model, trainer, lengths = CASES[case]
    config = run_config(models.folder(model), **trainer)
    batch = batch_of(lengths)
    results = run_ranks(make_plan(config).training.world_size, _step, config, batch, timeout=60)
    logprobs_N, loss, gradients = models.truth(model, lengths)

    completion_N = batch.sampled_N
    for found_N, metrics, _ in results:
        np.testing.assert_allclose(found_N, np.where(completion_N, logprobs_N, 0), atol=5e-5)
        assert metrics == results[0][1], "metrics must be the same on every rank"
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["weights"] == pytest.approx(batch.loss_weights_N.sum(), rel=1e-5)
    assert metrics["advantage_max"] == pytest.approx(max(0, (batch.loss_weights_N * batch.advantages_N).max()))
    assert_gradients_equal(results[0][2], gradients)


@pytest.mark.parametrize("sequence_parallel, lengths", [(True, MIXED), (False, GROUPS)], ids=["sp", "shared"])
def test_bf16_stays_close_to_fp32(models: Models, sequence_parallel: bool, lengths: list) -> None:
    model = {"tie_word_embeddings": True}
    config = run_config(models.folder(model), tp=2, pp=2, sequence_parallel=sequence_parallel, dtype="bf16")
    batch = batch_of(lengths)
    found_N, metrics, gradients = run_ranks(4, _step, config, batch)[0]
    logprobs_N, loss, expected = models.truth(model, lengths)
    assert np.abs(found_N - logprobs_N)[batch.behaviour_logprobs_N != 0].mean() < 0.03
    assert metrics["train/loss"] == pytest.approx(loss, abs=0.03)
    for name, truth in expected.items():
        cosine = (gradients[name] * truth).sum() / np.linalg.norm(gradients[name]) / np.linalg.norm(truth)
        assert cosine > 0.99, name


def test_padding_under_a_pipeline_is_bounded(models: Models) -> None:
    plan = make_plan(run_config(models.folder({}), pp=2))
    even, uneven = make_batch([60] * 8, VOCAB), make_batch([128, 3, 128, 5], VOCAB)
    assert step._padded_length(step.schedule_of(even, plan), even, plan) == 2 * 59
    assert step._padded_length(step.schedule_of(uneven, plan), uneven, plan) is None


@pytest.mark.parametrize("cp, shared", [(1, False), (2, False), (4, False), (1, True)])
def test_attention_never_builds_a_mask_over_the_whole_pack(cp: int, shared: bool) -> None:
    batch = make_groups([(100, [3, 20, 9, 4]), (7, [30, 1, 50])], VOCAB) if shared else \
        make_batch([64, 8, 60, 8, 8, 16, 120], VOCAB)
    (units,), = make_schedule(batch, 1, 1000, 2 * cp if cp > 1 else 1, share_prompts=shared)
    for rank in range(cp):
        micro = pack(batch, units, multiple=2 * cp if cp > 1 else 1, cp=cp, cp_rank=rank)
        plan = packed_attention.plan_documents(micro.documents, micro.positions_T, cp, rank)
        lengths = micro.documents.lengths_D
        keys = lengths + micro.documents.prefix_lengths_D
        assert sum(b.documents * b.query for b in plan.sub_batches) <= 2 * lengths.sum() // cp
        assert sum(b.documents * b.key for b in plan.sub_batches) <= 2 * keys.sum()
        masks = sum(b.mask.numel() for b in plan.sub_batches if b.mask is not None)
        assert masks <= 4 * (lengths * keys).sum() // cp
        assert all((b.mask is None) == (cp == 1 and b.key == b.query) for b in plan.sub_batches)
        assert any(b.key > b.query for b in plan.sub_batches) == (cp > 1 or shared)


def _rows_of_layers(rank: Rank, config: ResolvedConfig, batch: PolicyBatch) -> dict[str, int]:
    """Rows that went through the first layer and came out as logits."""
    training, rows = TrainingRank(rank, config), {"layer": 0, "logits": 0}

    def count(name: str, output: torch.Tensor) -> None:
        rows[name] += output.shape[0]

    model = training.chunks[0].module
    model.decoder.layers[0].register_forward_hook(lambda _, __, out: count("layer", out[0]))
    model.output_layer.register_forward_hook(lambda _, __, out: count("logits", out[0]))
    step.run_step(training.chunks, training.plan, batch, reinforce, TEMPERATURE)
    return rows


@pytest.mark.parametrize("share", ["auto", "off"])
def test_logits_are_made_for_completions_only_and_a_shared_prompt_once(models: Models, share: str) -> None:
    batch = batch_of(GROUPS)
    config = run_config(models.folder({}), token_budget=1000, share_prompts=share)
    (rows,) = run_ranks(1, _rows_of_layers, config, batch)
    prompts = sum(prompt * (1 if share == "auto" else len(completions)) for prompt, completions in GROUPS)
    completions = [n for _, lengths in GROUPS for n in lengths]
    assert rows == {"layer": prompts + sum(max(0, n - 1) for n in completions), "logits": sum(completions)}
