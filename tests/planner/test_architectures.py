"""The built-in models against Hugging Face's own files, and mixtures of experts for planning only."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launch.accuracy.score import development_points
from launch.errors import UserError
from launch.model.architecture import Architecture, parameter_count
from launch.model.builtin import from_builtin, known
from launch.model.hf_config import from_hf_config, from_hf_dict
from tests.launch.conftest import HF_CONFIGS

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "decoder_sparse_step": 1, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936}
"""As published with Qwen3-30B-A3B."""


def moe_folder(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | changes))
    return tmp_path


@pytest.mark.parametrize("file", [file for file in sorted(HF_CONFIGS.glob("*.json")) if known(file.stem)],
                         ids=lambda file: file.stem)
def test_the_table_repeats_the_published_config(file):
    assert from_builtin(file.stem) == from_hf_dict(json.loads(file.read_text()))


@pytest.mark.parametrize("name, meant", [
    ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"), ("Llama-3.1-70B", "llama-3.1-70b"),
    ("llama3.1-70b", "llama-3.1-70b"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
    ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo-2407"), ("allenai/OLMo-2-1124-13B-Instruct", "olmo-2-1124-13b"),
    ("instruct", None)])
def test_names_as_people_write_them(name, meant):
    assert known(name) == meant


def test_names_of_measured_models():
    assert known("llama3-70b") == "llama-3-70b" and known("llama31-405b") == "llama-3.1-405b"
    points = [point for point in development_points() if point.kind == "parameters" and known(point.model_name)]
    assert len(points) >= 10
    for point in points:        # the table and the files describe the same models
        assert sizes(from_builtin(point.model_name)) == sizes(point.model)


def sizes(model: Architecture) -> Architecture:
    """What a measured point's file says of a model."""
    return replace(model, family="", norm_eps=0.0, max_positions=0, rope={})


def test_unknown_name():
    with pytest.raises(UserError) as error:
        from_builtin("qwen3-33b", "run.yaml:3, model.path")
    assert "qwen3-32b" in error.value.fix.split(";")[0] and error.value.where == "run.yaml:3, model.path"


def test_experts_are_planned_but_not_run(tmp_path):
    found = from_hf_config(moe_folder(tmp_path), planning=True)
    assert found == from_builtin("Qwen/Qwen3-30B-A3B")
    assert (found.experts, found.experts_per_token, found.moe_ffn, found.qk_norm) == (128, 8, 768, True)
    assert parameter_count(found) == 30_532_122_624
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM.* can be planned, but not trained"):
        from_hf_config(tmp_path)


@pytest.mark.parametrize("changes", [{"num_experts": None}, {"num_experts_per_tok": 129}, {"mlp_only_layers": [0]},
                                     {"decoder_sparse_step": 2}, {"moe_intermediate_size": "768"},
                                     {"hidden_size": 0}, {"architectures": [["Qwen3MoeForCausalLM"]]}])
def test_experts_that_are_not_understood(tmp_path, changes):
    with pytest.raises(UserError) as error:
        from_hf_config(moe_folder(tmp_path, **changes), planning=True)
    assert error.value.fix and "config.json" in str(error.value)


def test_dense_folder(tmp_path):
    (tmp_path / "config.json").write_text((HF_CONFIGS / "qwen3-8b.json").read_text())
    assert parameter_count(from_hf_config(tmp_path, planning=True)) == 8_190_735_360
