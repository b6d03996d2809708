"""Reading config.json: against transformers' own reading and count, for published models; and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from launch.model.architecture import parameter_count
from launch.model.hf_config import from_hf_config, from_hf_dict
from tests.launch.conftest import HF_CONFIGS, TINY_MODEL

PUBLISHED = {"llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "qwen2.5-7b": 7_615_616_512,
             "qwen3-8b": 8_190_735_360, "smollm2-135m": 134_515_008, "mistral-7b-v0.3": 7_248_023_552,
             "mistral-nemo-2407": 12_247_782_400, "olmo-2-1124-7b": 7_298_617_344, "olmo-2-1124-13b": 13_716_198_400}
"""Parameters as the model cards' safetensors metadata give them."""


def read(name: str) -> dict:
    return json.loads((HF_CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    assert parameter_count(from_hf_dict(read(name))) == PUBLISHED[name]


@pytest.mark.parametrize("file", sorted(HF_CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_against_transformers(file):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    content = json.loads(file.read_text())
    mine = from_hf_dict(content)
    content.pop("architectures")
    config = CONFIG_MAPPING[content.pop("model_type")](**content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameter_count(mine) == sum(parameter.numel() for parameter in model.parameters())
    attention = model.model.layers[0].self_attn
    assert (mine.qkv_bias, mine.qk_norm) == (attention.q_proj.bias is not None, hasattr(attention, "q_norm"))
    assert mine.qk_norm_whole == (mine.qk_norm and attention.q_norm.weight.numel() == mine.q_width)
    assert mine.post_norm == (not hasattr(model.model.layers[0], "input_layernorm"))
    assert attention.o_proj.bias is None
    assert mine.rope == {key: config.rope_parameters[key] for key in sorted(config.rope_parameters)}
    assert (mine.layers, mine.hidden, mine.ffn, mine.heads, mine.kv_heads, mine.head_dim, mine.vocab) == (
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim if hasattr(config, "head_dim") else
        config.hidden_size // config.num_attention_heads, config.vocab_size)
    assert (mine.norm_eps, mine.max_positions, mine.initializer_range, mine.tied) == (
        config.rms_norm_eps, config.max_position_embeddings, config.initializer_range, config.tie_word_embeddings)


def test_old_and_new_rope_fields_are_one():
    old = read("llama-3.1-8b")
    new = dict(old)
    new["rope_parameters"] = {**new.pop("rope_scaling"), "rope_theta": new.pop("rope_theta")}
    older = dict(old)
    older["rope_scaling"] = {("type" if key == "rope_type" else key): value
                             for key, value in old["rope_scaling"].items()}
    assert from_hf_dict(old) == from_hf_dict(new) == from_hf_dict(older)
    assert from_hf_dict(old).rope == {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                      "original_max_position_embeddings": 8192, "rope_theta": 5e5,
                                      "rope_type": "llama3"}
    linear = from_hf_dict(TINY_MODEL | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope == {"factor": 2.0, "rope_theta": 10000.0, "rope_type": "linear"}
    without = {key: value for key, value in TINY_MODEL.items() if key != "rope_theta"}
    assert from_hf_dict(without).rope == {"rope_theta": 10000.0, "rope_type": "default"}


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                                   "vocab_size", "max_position_embeddings", "rms_norm_eps", "architectures"])
@pytest.mark.parametrize("spoiled", [None, "missing", "12", -1, 0, True, [], 1.5, float("inf")])
def test_missing_and_wrong_fields(field, spoiled):
    if field == "rms_norm_eps" and spoiled == 1.5:
        return
    content = {key: value for key, value in TINY_MODEL.items() if key != field}
    if spoiled != "missing":
        content[field] = spoiled
    with pytest.raises(UserError) as error:
        from_hf_dict(content, "m/config.json")
    assert field in str(error.value) and "m/config.json" in str(error.value)


@pytest.mark.parametrize("change, fragments", [
    ({"architectures": ["MixtralForCausalLM"]}, ["'MixtralForCausalLM' is not supported", "LlamaForCausalLM"]),
    ({"architectures": ["LlamaForCausalLM", "B"]}, ["does not name one architecture"]),
    ({"model_type": "qwen2"}, ["model_type = 'qwen2' does not belong to LlamaForCausalLM"]),
    ({"num_local_experts": 8}, ["num_local_experts = 8", "experts"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config", "quantised"]),
    ({"sliding_window": 64}, ["sliding_window = 64", "sliding-window"]),
    ({"use_sliding_window": True}, ["use_sliding_window = True"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "full attention"]),
    ({"attention_bias": True}, ["attention_bias = True"]), ({"mlp_bias": True}, ["mlp_bias = True"]),
    ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope type 'yarn' is not supported", "llama3"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope type 'dynamic' is not supported"]),
    ({"rope_scaling": {"type": "linear"}}, ["factor is missing", "rope parameters"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor is missing", "rope parameters"]),
    ({"rope_scaling": 3}, ["rope_parameters = 3 is not an object"]),
    ({"rope_theta": "big"}, ["rope_theta = 'big' is not a positive number"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads = 3 does not divide num_attention_heads = 8"]),
    ({"head_dim": 31}, ["head_dim = 31 is odd"]),
    ({"head_dim": None, "hidden_size": 129}, ["hidden_size = 129", "num_attention_heads = 8"])])
def test_what_is_refused(change, fragments):
    with pytest.raises(UserError) as error:
        from_hf_dict(TINY_MODEL | change, "m/config.json")
    for fragment in (*fragments, "m/config.json"):
        assert fragment in str(error.value)


@pytest.mark.parametrize("change, fragments", [
    ({"sliding_window": 4096}, ["sliding_window = 4096", "sliding-window"]),
    ({"sliding_window": "missing"},
     ["sliding_window = None", "the default is a window of 4096", '"sliding_window": null'])])
def test_a_mistral_must_say_that_it_has_no_window(change, fragments):
    content = {key: value for key, value in (read("mistral-7b-v0.3") | change).items() if value != "missing"}
    with pytest.raises(UserError) as error:
        from_hf_dict(content, "m/config.json")
    assert all(fragment in str(error.value) for fragment in (*fragments, "m/config.json"))


def test_qwen2_with_a_window_that_is_off_is_accepted():
    assert from_hf_dict(read("qwen2.5-7b")).family == "qwen2"


@pytest.mark.parametrize("content, fragment", [(None, "holds no config.json"), ("[]", "is not a JSON object"),
                                               ('{"a": ', "is not JSON"), (b"\xff\xfe", "cannot read"),
                                               ("[" * 100_000, "is not JSON")])
def test_broken_files(tmp_path, content, fragment):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as error:
        from_hf_config(tmp_path)
    assert fragment in str(error.value) and str(tmp_path) in str(error.value)
    with pytest.raises(UserError, match="no model folder"):
        from_hf_config(tmp_path / "nowhere")


VALUES = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=4) | st.lists(
    st.sampled_from(["LlamaForCausalLM", "Qwen3ForCausalLM", 3]), max_size=2) | st.dictionaries(
    st.sampled_from(["rope_type", "rope_theta", "factor", "type"]), st.none() | st.integers() | st.just("llama3"))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*TINY_MODEL, "rope_scaling", "rope_parameters", "layer_types",
                                        "use_sliding_window", "sliding_window", "quantization_config"]), VALUES))
def test_any_config_is_read_or_refused(change):
    try:
        architecture = from_hf_dict(TINY_MODEL | change)
    except UserError:
        return
    assert parameter_count(architecture) > 0
