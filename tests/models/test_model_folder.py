"""A model folder is complete, or one message says what is wrong. Each test damages a real folder in one way."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch.errors import UserError
from launch.model.architecture import tensor_shapes
from launch.model.folder import check_model_folder, read_safetensors_header
from launch.model.hf_config import from_hf_config
from tests.tiny_models import FAMILIES, make_tiny


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "llama", "llama", 0)


@pytest.fixture
def folder(complete, tmp_path):
    """A copy to damage."""
    return shutil.copytree(complete, tmp_path / "model")


@pytest.fixture
def sharded(complete, tmp_path):
    """The same model in several files with an index."""
    target = shutil.copytree(complete, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(complete).save_pretrained(target, max_shard_size="200KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def refused(folder, **settings) -> str:
    with pytest.raises(UserError) as caught:
        check_model_folder(folder, **settings)
    assert caught.value.exit_code == 2 and caught.value.where and caught.value.fix
    return str(caught.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_tensors_that_hugging_face_saves(family, tied, tmp_path):
    folder = make_tiny(tmp_path / "m", family, 0, tie_word_embeddings=tied)
    assert check_model_folder(folder).family == family
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert tensor_shapes(from_hf_config(folder)) == saved


def test_headers_are_read_as_safetensors_reads_them(complete):
    header = read_safetensors_header(complete / "model.safetensors")
    loaded = load_file(complete / "model.safetensors")
    assert {name: entry["shape"] for name, entry in header.items()} == {n: list(t.shape) for n, t in loaded.items()}


def test_sharded_and_half_precision_folders_are_complete(sharded, tmp_path):
    check_model_folder(sharded)
    check_model_folder(make_tiny(tmp_path / "m", "qwen2", 0, dtype=torch.bfloat16))


def test_a_missing_folder_names_the_nearest(folder):
    assert f"did you mean {folder}?" in refused(folder.parent / "modle")
    assert "megatron-rl models get" in refused(folder.parent / "elsewhere" / "x")


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(folder)


def test_a_folder_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert "holds no tokenizer" in refused(folder)


def test_another_architecture_is_refused_with_the_supported_ones(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["GPT2LMHeadModel"]}))
    message = refused(folder)
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in message


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused(folder)
    assert "neither model.safetensors nor model.safetensors.index.json" in message
    assert "found pytorch_model.bin" in message and "model.init=random" in message
    check_model_folder(folder, weights=False)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -4, -100_000])
def test_a_truncated_file(keep, folder):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    assert f"{file} is truncated or damaged" in refused(folder)


def test_a_file_with_bytes_too_many(folder):
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"0")
    assert "is truncated or damaged" in refused(folder)


@pytest.mark.parametrize("header", [b"{}x", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2]}}',
                                    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'])
def test_a_header_of_nonsense(header, folder):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    assert "is truncated or damaged" in refused(folder)


def test_a_header_length_of_garbage_is_not_read_into_memory(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "its header is said to have" in refused(folder)


def test_a_missing_shard(sharded):
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    message = refused(sharded)
    assert "weight files are missing" in message and lost.name in message


def test_a_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is truncated" in refused(sharded)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index(content, sharded):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "is not an index of safetensors" in refused(sharded)


def test_missing_tensors(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    save_file(tensors, file)
    message = refused(folder)
    assert "2 of " in message and "tensors are missing" in message and "model.layers.1.mlp.up_proj.weight" in message


def test_a_tensor_of_another_shape(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, file)
    assert "model.norm.weight in" in (message := refused(folder))
    assert "has shape [64], but config.json gives [128]" in message


def test_a_tensor_of_a_type_that_cannot_be_trained(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones(128, dtype=torch.int8)
    save_file(tensors, file)
    assert "model.norm.weight" in (message := refused(folder)) and "I8" in message


def test_the_key_that_holds_the_path_is_named(folder):
    (folder / "model.safetensors").unlink()
    assert "where: run.yaml:7, model.path" in refused(folder, where="run.yaml:7, model.path")
