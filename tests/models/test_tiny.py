"""Tiny model folders are ordinary Hugging Face folders, the same from the same seed."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.model.hf_config import from_hf_config
from megatron_rl.models.tiny import CHARACTERS, byte_tokenizer, character_tokenizer, write_tiny
from tests.tiny_models import FAMILIES, make_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_the_weights(family, tmp_path):
    def weights(name, seed):
        return AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / name, family, seed)).state_dict()

    one, same, other = weights("a", 1), weights("b", 1), weights("c", 2)
    for name in one:
        assert torch.equal(one[name], same[name]), name
        assert not torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_parameters_of_a_test_model_are_alike(family, tmp_path):
    """Otherwise a test could not detect that two of them are swapped."""
    weights = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "m", family, 0)).state_dict()
    for (a, x), (b, y) in itertools.combinations(weights.items(), 2):
        assert x.shape != y.shape or not torch.equal(x, y), (a, b)
    assert all(tensor.std() > 0.05 for tensor in weights.values())


def test_drawing_weights_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_tiny(tmp_path / "m", "llama", 0)
    assert torch.equal(torch.rand(3), expected)


def test_overrides_reach_the_config(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}
    architecture = from_hf_config(make_tiny(tmp_path / "m", "llama", 0, num_hidden_layers=3, rope_parameters=rope,
                                            tie_word_embeddings=True))
    assert (architecture.layers, architecture.tied) == (3, True)
    assert architecture.rope == rope


def test_without_a_seed_no_weights_are_written(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama", None, tokenizer="characters", vocab_size=64)
    assert not list(folder.glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2


@pytest.mark.parametrize(("tokenizer", "size"), [(byte_tokenizer, 259), (character_tokenizer, 64)])
def test_tokenizers_give_back_what_they_read(tokenizer, size):
    tokenizer = tokenizer()
    assert len(tokenizer) == size
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(CHARACTERS) == 60
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == CHARACTERS
