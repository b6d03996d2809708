"""Policy and teacher must give the same ids to the same tokens: real tokenizers, as a run finds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launch.cli.main import main
from launch.errors import UserError
from launch.model.tokenizer import check_same_ids
from megatron_rl.models.tiny import byte_tokenizer, character_tokenizer, write_tiny

SHIPPED = Path("configs/tiny/model")


def test_the_same_and_more_tokens_pass_others_do_not(tmp_path):
    more, fewer, other = tmp_path / "more", tmp_path / "fewer", tmp_path / "other"
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(fewer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(more)
    byte_tokenizer().save_pretrained(other)
    check_same_ids(fewer, fewer, "key")
    check_same_ids(fewer, more, "key")
    with pytest.raises(UserError, match=r"1 of the policy's 65 tokens differ, the first is '<think>' \(policy: id 64, "
                                        r"teacher: no such token\)"):
        check_same_ids(more, fewer, "key")
    with pytest.raises(UserError, match="the teacher has another tokenizer"):
        check_same_ids(fewer, other, "key")


def test_two_tokens_with_each_others_ids_are_found(tmp_path):
    swapped = tmp_path / "swapped"
    shutil.copytree(SHIPPED, swapped)
    content = json.loads((swapped / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["3"], vocab["7"] = vocab["7"], vocab["3"]
    (swapped / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match="2 of the policy's 64 tokens differ, the first is '3'"):
        check_same_ids(SHIPPED, swapped, "key")


@pytest.mark.parametrize("content, message", [(None, "has no tokenizer.json"), ("{", "is not a tokenizer")])
def test_a_tokenizer_that_cannot_be_compared(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        check_same_ids(SHIPPED, tmp_path, "key")


def test_launch_refuses_before_anything_starts(tmp_path, capsys):
    teacher = write_tiny(tmp_path / "teacher", tokenizer="bytes", vocab_size=320)
    code = main(["launch", "configs/tiny/grpo.yaml", "--on", "local", "--device", "cpu", f"run.dir={tmp_path / 'runs'}",
                 f"algorithm.distillation.teacher={teacher}"])
    error = capsys.readouterr().err
    assert code == 2 and "the teacher has another tokenizer" in error
    assert "algorithm.distillation.teacher" in error and str(teacher) in error
    assert not (tmp_path / "runs").exists()
