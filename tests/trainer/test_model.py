from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from launch.config.resolved import ResolvedConfig
from launch.errors import UserError
from launch.model.hf_config import from_hf_config
from megatron_rl.trainer import cpu, parallel
from megatron_rl.trainer.rope import inverse_frequencies
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import make_plan, run_config

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_inverse_frequencies_are_those_of_hugging_face(kind: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, rope_parameters=ROPES[kind])
    truth = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    architecture = from_hf_config(tmp_path)
    assert architecture.rope == dict(sorted(ROPES[kind].items()))
    found = inverse_frequencies(architecture)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, truth, rtol=0, atol=0)


@pytest.mark.parametrize("rope", [
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
])
def test_rope_that_would_be_silently_wrong_is_refused(rope: dict, tmp_path: Path) -> None:
    architecture = replace(from_hf_config(make_tiny(tmp_path)), rope=rope)
    with pytest.raises(UserError, match="RoPE .* is not supported"):
        inverse_frequencies(architecture)


def test_device_shim_notices_another_megatron() -> None:
    def without_a_device() -> str:
        return "rocm"

    with pytest.raises(RuntimeError, match="names no CUDA device any more"):
        cpu._rewrite_device_names(without_a_device)
    with pytest.raises(RuntimeError, match="has no renamed any more"):
        cpu._replace(cpu, "renamed", without_a_device)


def _mistaken_plan(rank: Rank, config: ResolvedConfig) -> str:
    plan = make_plan(config)
    swapped = {"ranks": tuple(reversed(plan.training.ranks))}
    plan = plan.model_copy(update={"training": plan.training.model_copy(update=swapped)})
    try:
        parallel.initialise(plan, rank.rank, rank.address, rank.port, rank.timeout_s)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def _nobody_else_comes(rank: Rank, config: ResolvedConfig) -> str:
    try:
        parallel.initialise(make_plan(config), 0, rank.address, rank.port, timeout_s=2)
    except TimeoutError as error:
        return str(error)
    return "came"


def test_coordinates_that_differ_from_the_plan_end_the_rank(tmp_path: Path) -> None:
    config = run_config(make_tiny(tmp_path), tp=2)
    messages = run_ranks(2, _mistaken_plan, config)
    assert all("the plan puts rank" in message for message in messages)


def test_rendezvous_has_a_deadline_that_names_who_waited(tmp_path: Path) -> None:
    config = run_config(make_tiny(tmp_path), tp=2)
    (message,) = run_ranks(1, _nobody_else_comes, config, timeout=30)
    assert message == "training rank 0: training rank 1 did not come within 2 s"
