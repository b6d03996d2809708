"""Parameter counts and FLOPs, against published figures and closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.accuracy import parameters as validation
from launch.accuracy.score import development_points
from launch.model.architecture import Architecture, parameter_count
from launch.model.builtin import from_builtin
from launch.plan.layouts import TrainingLayout, even_layers, layers_of_stage
from launch.planner.parameters import (
    count,
    flops_per_token,
    layer,
    matrix_parameters,
    padded_vocab,
    parameters_of,
)

PUBLISHED = {
    "llama-3-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560}
"""As the safetensors metadata of the published checkpoints say."""
GPT2 = Architecture(12, 768, 3072, 12, 12, 64, 50257, True, mlp_matrices=2, all_biases=True,
                  learned_positions=1024)
LLAMA70 = from_builtin("llama-3.1-70b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    assert count(from_builtin(name)) == PUBLISHED[name]


def test_gpt_style_with_biases_and_positions():
    assert count(GPT2) == 124_439_808       # Hugging Face's gpt2


def test_matrix_parameters_of_experts():
    """Published activated parameters, which count the input embedding too."""
    for name, activated in (("qwen3-30b-a3b", 3.3e9), ("qwen3-235b-a22b", 22e9)):
        shape = from_builtin(name)
        assert matrix_parameters(shape) + shape.vocab * shape.hidden == pytest.approx(activated, rel=0.02)


def test_models_of_the_measured_points():
    points = [point for point in development_points() if point.kind == "parameters"]
    assert len(points) >= 12
    for point in points:
        assert [each.error for each in validation.predict(point, validation.default())] == [0.0], point.id


SIZES = st.fixed_dictionaries({
    "layers": st.integers(1, 5), "hidden": st.sampled_from([8, 24, 64]), "ffn": st.integers(1, 99),
    "heads": st.sampled_from([2, 4]), "kv_heads": st.sampled_from([1, 2]), "head_dim": st.sampled_from([4, 16]),
    "vocab": st.integers(1, 999), "tied": st.booleans(), "qkv_bias": st.booleans(),
    "qk_norm": st.booleans()})


@settings(max_examples=30, deadline=None)
@given(SIZES)
def test_against_the_tensors_of_the_checkpoint(sizes):
    architecture = Architecture(family="llama", norm_eps=1e-5, max_positions=64, initializer_range=0.02, rope={},
                                **sizes)
    assert count(architecture) == parameter_count(architecture)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([LLAMA70, from_builtin("qwen3-4b"), from_builtin("qwen2.5-72b"), from_builtin("qwen3-30b-a3b"),
                        GPT2]),
       st.sampled_from([1, 2, 4]), st.integers(1, 6), st.sampled_from([1, 2, 8]))
def test_ranks_hold_the_model(shape, tp, pp, ep):
    """All TP ranks of all stages (all EP ranks for the experts) together: the model, the padding, what is replicated
    and a tied embedding's second copy; nothing else."""
    stages = parameters_of(shape, TrainingLayout(tp=tp, pp=pp, ep=ep, dp=8)).stages
    held = sum(tp * stage.dense + ep * stage.experts for stage in stages)
    padding = (padded_vocab(shape, tp) - shape.vocab) * shape.hidden * (1 if shape.tied and pp == 1 else 2)
    norm = (2 if shape.all_biases else 1) * shape.hidden
    positions = shape.learned_positions * shape.hidden
    replicated = (tp - 1) * (shape.layers * layer(shape).replicated + norm + positions)
    second_copy = shape.vocab * shape.hidden if shape.tied and pp > 1 else 0
    assert held == count(shape) + padding + replicated + second_copy


def test_layers_of_stages():
    assert even_layers(80, 4) == (20, 20, 20, 20)
    assert even_layers(126, 8, 8) == (15, 16, 16, 16, 16, 16, 16, 15)
    assert even_layers(35, 4) == (9, 9, 9, 8)
    assert all(sum(even_layers(layers, pp)) == layers for layers in range(1, 60) for pp in range(1, layers + 1))
    uneven = TrainingLayout(pp=2, layers_of_stage=(50, 30))
    first, last = parameters_of(LLAMA70, uneven).stages
    assert first.layers * 3 == last.layers * 5


def test_layers_of_a_run_are_those_of_its_plan():
    for layers in range(1, 80):
        for pp in range(1, min(layers, 12) + 1):
            plan = tuple(sum(map(len, stage)) for stage in layers_of_stage(layers, pp, 1))
            assert even_layers(layers, pp) == plan


def test_flops_of_a_token():
    # The same run is quoted both ways: Llama-3-70B at 8k, 6 N + attention.
    assert flops_per_token(LLAMA70, 8192, causal=False) == pytest.approx(4.81e11, rel=0.002)
    assert flops_per_token(LLAMA70, 8192) == pytest.approx(4.49e11, rel=0.002)
    assert matrix_parameters(LLAMA70) == pytest.approx(count(LLAMA70) - 128256 * 8192, rel=1e-4)
    assert flops_per_token(LLAMA70, 8192, convention="no_attention") == 6 * matrix_parameters(LLAMA70)
    assert flops_per_token(LLAMA70, 8192, convention="causal_lora") == pytest.approx(
        flops_per_token(LLAMA70, 8192) * 2 / 3)
    assert flops_per_token(LLAMA70, 8192, convention="lora_no_attention") == 4 * matrix_parameters(LLAMA70)


def test_narayanan_flops_formula():
    """arXiv 2104.04473, equation 3: 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) a batch, with full recomputation."""
    gpt = Architecture(96, 12288, 49152, 96, 96, 128, 51200, True, mlp_matrices=2)
    s, h, n = 2048, gpt.hidden, gpt.layers
    published = 96 * n * h * h * (1 + s / (6 * h) + gpt.vocab / (16 * n * h))
    assert flops_per_token(gpt, s, convention="noncausal_with_full_recompute") == pytest.approx(published, rel=1e-9)


def test_a_builtin_dense_model_needs_no_folder():
    assert from_builtin("qwen3-32b").head_dim * 64 == 8192
