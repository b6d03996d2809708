"""The trainer on one GPU: Transformer Engine's layers, bf16, packed documents (THD), checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from launch.config.resolved import ResolvedConfig
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.layouts.step_folder import checkpoint_folder
from megatron_rl.trainer.trainer import MegatronTrainer
from tests.gpu.one_gpu import on_gpu
from tests.ranks import Rank
from tests.tiny_models import make_tiny
from tests.trainer.harness import hugging_face, make_batch, make_plan
from tests.trainer.runs import (
    assert_same_bits,
    batches,
    config_of,
    keep_next_gradient,
    logprobs,
    start,
    whole_model,
)

VOCAB = 320
LENGTHS = [17, 40, 9, 33, 5, 61, 1, 2, 22]
"""Documents of one token and of unequal lengths, packed into three micro-batches of up to 64 tokens."""
Device = Literal["cpu", "gpu"]


def _one_update(rank: Rank, config: ResolvedConfig, batch: PolicyBatch, device: Device) -> dict[str, Any]:
    trainer = start(rank, config, device)
    trainer.load_initial_weights()
    logprobs_N = logprobs(trainer, batch)
    gradients = keep_next_gradient(trainer)
    metrics = trainer.update(batch)
    layer = trainer.optimizer.chunks[0].module.decoder.layers[0]
    return {"logprobs": logprobs_N, "gradients": gradients[0], "metrics": metrics, "after": logprobs(trainer, batch),
            "fused": layer.self_attention.linear_qkv.fuse_wgrad_accumulation if device == "gpu" else None,
            "modules": [type(module).__module__ for module in (layer.self_attention.linear_qkv,
                                                               layer.self_attention.core_attention)]}


def assert_is_hugging_faces(found: dict[str, Any], folder: Path, batch: PolicyBatch) -> None:
    """Log-probs and gradients, within what bf16 rounds off."""
    logprobs_N, _, gradients = hugging_face(folder, batch, entropy_bonus=0.0)
    completion_N = batch.behaviour_logprobs_N != 0
    assert np.abs(found["logprobs"] - logprobs_N)[completion_N].mean() < 0.03
    assert (found["logprobs"][~completion_N] == 0).all()
    assert found["gradients"].keys() == gradients.keys()
    for name, truth in gradients.items():
        gradient = found["gradients"][name]
        cosine = (gradient * truth).sum() / np.linalg.norm(gradient) / np.linalg.norm(truth)
        assert cosine > 0.99, f"{name}: {cosine}"
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values()))
    assert found["metrics"]["train/grad_norm"] == pytest.approx(norm, rel=0.03)
    assert found["metrics"]["train/microbatches"] >= 3
    assert not np.array_equal(found["after"], found["logprobs"]), "the update changed the weights"


@pytest.mark.gpu
@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen2", True), ("qwen3", False),
                                          ("mistral", False), ("olmo2", False)])
def test_one_step_with_transformer_engine_equals_hugging_face(tmp_path, family, tied) -> None:
    folder = make_tiny(tmp_path, family, tie_word_embeddings=tied)
    batch = make_batch(LENGTHS, VOCAB)
    found = on_gpu(_one_update, config_of(folder, dtype="bf16", token_budget=64), batch, "gpu")
    assert all("transformer_engine" in module for module in found["modules"]), found["modules"]
    assert found["fused"], "gradient_accumulation_fusion: auto"
    assert_is_hugging_faces(found, folder, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_that_the_product_accumulates_equal_those_added_after_it(tmp_path, tied) -> None:
    folder = make_tiny(tmp_path, "qwen2", tie_word_embeddings=tied)
    batch = make_batch(LENGTHS, VOCAB)
    fused, apart = (on_gpu(_one_update, config_of(folder, dtype="bf16", token_budget=64,
                                                  gradient_accumulation_fusion=each), batch, "gpu")
                    for each in (True, False))
    assert fused["fused"] and not apart["fused"]
    for name, gradient in apart["gradients"].items():       # which are rounded to bf16 before they are added
        worst = np.abs(fused["gradients"][name] - gradient).max() / np.abs(gradient).max()
        assert worst < 0.02, f"{name}: {worst}"


def _waits(rank: Rank, configs: list[ResolvedConfig], batch: PolicyBatch) -> list[tuple[int, float]]:
    """For each configuration, how often the host waits for the GPU in an update, and its micro-batches."""
    found: list[tuple[int, float]] = []
    for config in configs:
        trainer = MegatronTrainer(config, make_plan(config, "gpu"), 0) if found else start(rank, config, "gpu")
        trainer.load_initial_weights()
        trainer.update(batch)           # what is compiled and allocated at the first use
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            metrics = trainer.update(batch)
            torch.cuda.set_sync_debug_mode("default")
        found.append((sum("synchronizing CUDA operation" in str(each.message) for each in caught),
                      metrics["train/microbatches"]))
    return found


@pytest.mark.gpu
def test_no_micro_batch_makes_the_host_wait_for_the_gpu(tmp_path) -> None:
    """As `tests/trainer/test_host_syncs.py` counts operations, on the real device."""
    folder = make_tiny(tmp_path, "llama")
    configs = [config_of(folder, dtype="bf16", token_budget=budget) for budget in (64, 256)]
    many, few = on_gpu(_waits, configs, make_batch(LENGTHS, VOCAB), timeout=300.0)
    assert many[1] > few[1] and many[0] == few[0]


@pytest.mark.gpu
def test_fp32_with_transformer_engine_equals_hugging_face_closely(tmp_path) -> None:
    """Unfused attention: the only one of Transformer Engine's that takes fp32."""
    folder = make_tiny(tmp_path, "llama")
    batch = make_batch(LENGTHS, VOCAB)
    found = on_gpu(_one_update, config_of(folder, dtype="fp32", token_budget=64), batch, "gpu")
    logprobs_N, _, _ = hugging_face(folder, batch, entropy_bonus=0.0)
    completion_N = batch.behaviour_logprobs_N != 0
    np.testing.assert_allclose(found["logprobs"], np.where(completion_N, logprobs_N, 0), atol=5e-3)
    assert_is_hugging_faces(found, folder, batch)


def _state(trainer: MegatronTrainer) -> dict[str, Any]:
    """Weights, Adam's moments and step count, and the numbers that the device's generator draws next."""
    (part,) = trainer.optimizer.parts
    adam = part.optimizer
    moments = [adam.state[parameter][key].float().cpu().numpy().copy() for group in adam.param_groups
               for parameter in group["params"] for key in ("exp_avg", "exp_avg_sq")]
    steps = {group["step"] for group in adam.param_groups if group["params"]}      # Transformer Engine's: of a group
    return {"weights": whole_model(trainer), "moments": moments, "steps": steps, "updates": trainer.optimizer.updates,
            "drawn": torch.rand(3, device=trainer.device).tolist()}


def _train_and_save(rank: Rank, config: ResolvedConfig, folder: Path, device: Device) -> dict[str, Any]:
    trainer = start(rank, config, device)
    trainer.load_initial_weights()
    for batch in batches(VOCAB, 2):
        trainer.update(batch)
    trainer.begin_save(folder, {"step": 2}, background=True)
    state = _state(trainer)
    for batch in batches(VOCAB, 1, first=5):
        trainer.update(batch)           # while the copy is written
    while not trainer.checkpoint_progress(60.0).finished:
        pass
    return state


def _load(rank: Rank, config: ResolvedConfig, folder: Path, device: Device) -> dict[str, Any]:
    trainer = start(rank, config, device)
    loaded = trainer.load(folder)
    assert loaded["rng_restored"] and loaded["extra"] == {"step": 2}
    state = _state(trainer)
    (batch,) = batches(VOCAB, 1, first=2)
    assert trainer.update(batch)["train/skipped"] == 0
    return state


def assert_loads_what_was_saved(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    assert_same_bits(loaded["weights"], saved["weights"])
    assert len(loaded["moments"]) == len(saved["moments"]) > 0
    for found, expected in zip(loaded["moments"], saved["moments"], strict=True):
        np.testing.assert_array_equal(found, expected)
        assert expected.any(), "moments that were never updated would prove nothing"
    assert (loaded["updates"], loaded["drawn"]) == (2, saved["drawn"])
    assert loaded["steps"] == saved["steps"] == {2}


@pytest.mark.gpu
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed-optimizer", "plain-optimizer"])
def test_checkpoint_comes_back_bit_for_bit(tmp_path, distributed) -> None:
    model = make_tiny(tmp_path / "model", "qwen3")
    config = config_of(model, dtype="bf16", distributed_optimizer=distributed)
    folder = checkpoint_folder(tmp_path, 2)
    saved = on_gpu(_train_and_save, config, folder, "gpu")
    assert_loads_what_was_saved(saved, on_gpu(_load, config, folder, "gpu"))
