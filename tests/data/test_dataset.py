"""Reading prompts from real files, and one clear message for every way in which a file can be wrong."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest

from launch.config.auto import on_this_machine
from launch.config.resolved import ResolvedConfig
from launch.config.schema import RunConfig
from launch.errors import UserError
from megatron_rl.data.dataset import fingerprint, load_prompts

ROWS = [{"prompt": "max 3 7=", "answer": "7", "level": 1}, {"prompt": "max 9 2=", "answer": "9", "level": 2}]
CHAT = [{"messages": [{"role": "user", "content": "Add 2 and 3."}], "answer": 5}]


def config(train: str, *, limit: int = 64, **data) -> ResolvedConfig:
    return on_this_machine(RunConfig.model_validate({
        "run": {"name": "t", "steps": 1}, "model": {"path": "unused"}, "trainer": {"optimizer": {"lr": 1e-3}},
        "rollout": {"max_prompt_tokens": limit, "max_new_tokens": 4},
        "algorithm": {"group_size": 2, "prompts_per_step": 1}, "reward": {"functions": [{"function": "exact_match"}]},
        "data": {"train": str(train), **data}}))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path, rows):
    """With `datasets`, as users do."""
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return path


WRITERS = pytest.mark.parametrize(("suffix", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet)])


def refused(tokenizer, path, **settings) -> str:
    with pytest.raises(UserError) as caught:
        load_prompts(config(path, **settings), tokenizer, "train")
    assert caught.value.exit_code == 2
    assert str(path) in caught.value.where and caught.value.fix
    return str(caught.value)


@WRITERS
def test_prompts_of_both_formats(suffix, write, tmp_path, plain_tokenizer):
    prompts = load_prompts(config(write(tmp_path / f"train.{suffix}", ROWS)), plain_tokenizer, "train")
    assert [p.index for p in prompts] == [0, 1]
    assert [p.text for p in prompts] == ["max 3 7=", "max 9 2="]
    assert [p.answer for p in prompts] == ["7", "9"]
    assert [p.columns for p in prompts] == [{"level": 1}, {"level": 2}]
    assert prompts[0].token_ids.dtype == np.int32
    assert prompts[0].token_ids.tolist() == plain_tokenizer("max 3 7=")["input_ids"]


@WRITERS
def test_messages_go_through_the_chat_template(suffix, write, tmp_path, chat_tokenizer):
    path = write(tmp_path / f"train.{suffix}", CHAT)
    (prompt,) = load_prompts(config(path, system="Be brief."), chat_tokenizer, "train")
    assert prompt.text == "system: Be brief.\nuser: Add 2 and 3.\nassistant: "
    assert prompt.answer == "5", "a number is compared as text"


def test_both_formats_of_the_same_rows_have_one_fingerprint(tmp_path, plain_tokenizer):
    prompts = [load_prompts(config(path), plain_tokenizer, "train") for path in
               (write_jsonl(tmp_path / "a.jsonl", ROWS), write_parquet(tmp_path / "a.parquet", ROWS))]
    assert fingerprint(prompts[0]) == fingerprint(prompts[1])


@pytest.mark.parametrize("change", [
    {"answer": "8"}, {"prompt": "max 3 8="}, {"level": 3}, {"more": None}])
def test_the_fingerprint_sees_every_change(change, tmp_path, plain_tokenizer):
    before = load_prompts(config(write_jsonl(tmp_path / "a.jsonl", ROWS)), plain_tokenizer, "train")
    changed = load_prompts(config(write_jsonl(tmp_path / "b.jsonl", [{**ROWS[0], **change}, ROWS[1]])),
                           plain_tokenizer, "train")
    swapped = load_prompts(config(write_jsonl(tmp_path / "c.jsonl", ROWS[::-1])), plain_tokenizer, "train")
    assert len({fingerprint(before), fingerprint(changed), fingerprint(swapped)}) == 3


def test_columns_may_have_other_names(tmp_path, plain_tokenizer):
    path = write_jsonl(tmp_path / "train.jsonl", [{"question": "max 1 2=", "gold": "2"}])
    (prompt,) = load_prompts(config(path, prompt_column="question", answer_column="gold"), plain_tokenizer, "train")
    assert (prompt.text, prompt.answer, prompt.columns) == ("max 1 2=", "2", {})


def test_blank_lines_and_rows_of_unlike_columns_are_fine(tmp_path, plain_tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "answer": null}\n\n  \n{"prompt": "b", "answer": 1.5, "hint": [1, "x"]}')
    prompts = load_prompts(config(path), plain_tokenizer, "train")
    assert [(p.answer, p.columns) for p in prompts] == [(None, {}), ("1.5", {"hint": [1, "x"]})]


def test_the_split_chooses_the_file(tmp_path, plain_tokenizer):
    both = config(write_jsonl(tmp_path / "t.jsonl", ROWS), eval=str(write_jsonl(tmp_path / "e.jsonl", ROWS[1:])))
    assert len(load_prompts(both, plain_tokenizer, "train")) == 2
    assert len(load_prompts(both, plain_tokenizer, "eval")) == 1


def test_no_eval_file(tmp_path, plain_tokenizer):
    with pytest.raises(UserError, match="no data set to evaluate on") as caught:
        load_prompts(config(tmp_path / "t.jsonl"), plain_tokenizer, "eval")
    assert "data.eval" in caught.value.where


def test_a_missing_file_names_the_nearest(tmp_path, plain_tokenizer):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert "did you mean" in refused(plain_tokenizer, tmp_path / "tain.jsonl")
    assert "does not exist" in refused(plain_tokenizer, tmp_path / "elsewhere" / "rows.jsonl")


def test_a_folder_in_place_of_a_file(tmp_path, plain_tokenizer):
    (tmp_path / "rows.jsonl").mkdir()
    assert "is a folder" in refused(plain_tokenizer, tmp_path / "rows.jsonl")


def test_another_format(tmp_path, plain_tokenizer):
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    assert "neither .jsonl nor .parquet" in refused(plain_tokenizer, tmp_path / "rows.csv")


@WRITERS
def test_an_empty_file(suffix, write, tmp_path, plain_tokenizer):
    path = tmp_path / f"train.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n\n")
    else:
        datasets.Dataset.from_dict({"prompt": [], "answer": []}).to_parquet(str(path))
    assert "holds no rows" in refused(plain_tokenizer, path)


@pytest.mark.parametrize(("line", "message"), [
    (b'{"prompt": "b", "answer": ', "line 2 .* is not JSON"),
    (b'["b", "1"]', "line 2 .* is a JSON list"),
    (b'{"prompt": "\xff", "answer": "1"}', "line 2 .* is not JSON.*utf-8"),
    (b'{"prompt": "b", "answer": "1"}{}', "line 2 .* is not JSON.*Extra data"),
])
def test_a_broken_line_is_named(line, message, tmp_path, plain_tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "1"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message) as caught:
        load_prompts(config(path), plain_tokenizer, "train")
    assert "line 2" in caught.value.where


@pytest.mark.parametrize("cut", [0, 2, -20])
def test_a_truncated_parquet_file(cut, tmp_path, plain_tokenizer):
    path = write_parquet(tmp_path / "train.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:cut])
    assert "not a readable Parquet file" in refused(plain_tokenizer, path)


@WRITERS
@pytest.mark.parametrize(("row", "wanted", "fix"), [
    ({"promt": "a", "answer": "1"}, "row 0 has no 'prompt' or 'messages'", "data.prompt_column=promt"),
    ({"mesages": [], "answer": "1"}, "row 0 has no 'prompt' or 'messages'", "data.messages_column=mesages"),
    ({"prompt": "a", "anwser": "1"}, "row 0 has no 'answer'", "data.answer_column=anwser"),
    ({"prompt": "a", "x": "1"}, "row 0 has no 'answer'; its columns are prompt, x", "add the column"),
])
def test_a_missing_column_names_the_nearest(row, wanted, fix, suffix, write, tmp_path, plain_tokenizer):
    message = refused(plain_tokenizer, write(tmp_path / f"train.{suffix}", [row]))
    assert wanted in message and fix in message


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": 3, "answer": "1"}, "'prompt' is int, not a string"),
    ({"prompt": "a", "answer": ["1"]}, "'answer' is list"),
    ({"prompt": "a", "answer": True}, "'answer' is bool"),
    ({"prompt": "", "answer": "1"}, "row 1 renders to an empty prompt"),
])
def test_columns_of_the_wrong_kind(row, message, tmp_path, plain_tokenizer):
    assert message in refused(plain_tokenizer, write_jsonl(tmp_path / "t.jsonl", [ROWS[0], row]))


@pytest.mark.parametrize(("messages", "message"), [
    ([], "not a list of messages"),
    ("hello", "not a list of messages"),
    ([{"role": "user"}], "not a list of messages"),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "nothing to answer"),
])
def test_malformed_messages(messages, message, tmp_path, chat_tokenizer):
    path = write_jsonl(tmp_path / "t.jsonl", [{"messages": messages, "answer": 1}])
    assert message in refused(chat_tokenizer, path)


def test_messages_without_a_chat_template_name_the_row(tmp_path, plain_tokenizer):
    assert "row 0: chat messages need a chat template" in refused(
        plain_tokenizer, write_jsonl(tmp_path / "t.jsonl", CHAT))


def test_long_prompts_are_counted_and_the_longest_shown(tmp_path, plain_tokenizer):
    rows = [{"prompt": "a" * length, "answer": "1"} for length in (3, 8, 12, 9)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    message = refused(plain_tokenizer, path, limit=8)
    assert "2 of 4 prompts are longer than rollout.max_prompt_tokens = 8" in message
    assert "the longest, row 2, has 12 tokens" in message
    assert "rollout.max_prompt_tokens=12" in message and "data.overlong" in message
    assert len(load_prompts(config(path, limit=12), plain_tokenizer, "train")) == 4


def test_the_limit_counts_the_rendered_template(tmp_path, chat_tokenizer):
    path = write_jsonl(tmp_path / "t.jsonl", [{"prompt": "hello", "answer": "1"}])
    rendered = len("user: hello\nassistant: ")
    assert f"has {rendered} tokens" in refused(chat_tokenizer, path, limit=rendered - 1)
