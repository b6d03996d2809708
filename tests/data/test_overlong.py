"""Prompts over the limit: refused, left out, or cut at their beginning. Lengths are those of the rendered tokens, which
Hugging Face's own `apply_chat_template` gives here."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from launch.errors import UserError
from megatron_rl.data.dataset import fingerprint, load, load_prompts
from tests.data.test_dataset import config, write_jsonl

TEXTS = ["a" * 3, "b" * 30, "c" * 8, "The question is: " + "d" * 40, "e" * 30, "f"]


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "t.jsonl", [{"prompt": text, "answer": str(row), "row": row}
                                              for row, text in enumerate(TEXTS)])


def rendered(tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                         tokenize=True, return_dict=False)


@pytest.fixture
def lengths(chat_tokenizer) -> list[int]:
    return [len(rendered(chat_tokenizer, text)) for text in TEXTS]


def test_dropped_rows_leave_a_data_set_without_gaps(path, chat_tokenizer, lengths, tmp_path):
    limit = lengths[1] - 1
    prompts, overlong = load(config(path, limit=limit, overlong="drop"), chat_tokenizer, "train")
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert [prompt.row for prompt in prompts] == [prompt.columns["row"] for prompt in prompts] == [0, 2, 5]
    assert (overlong.count, overlong.of, overlong.longest, overlong.tokens) == (3, 6, 3, lengths[3])
    assert replace(prompts[2], instance=3).row == 5
    short = write_jsonl(tmp_path / "short.jsonl", [json.loads(path.read_text().splitlines()[row]) for row in (0, 2, 5)])
    assert fingerprint(prompts) == fingerprint(load_prompts(config(short), chat_tokenizer, "train"))


def test_the_end_of_a_truncated_prompt_is_kept_token_by_token(path, chat_tokenizer, lengths):
    limit = lengths[1] - 2
    prompts, overlong = load(config(path, limit=limit, overlong="truncate_left"), chat_tokenizer, "train")
    assert overlong.count == 3 and [prompt.row for prompt in prompts] == list(range(6))
    for prompt, text in zip(prompts, TEXTS, strict=True):
        whole = rendered(chat_tokenizer, text)
        assert prompt.token_ids.tolist() == whole[-limit:] and prompt.token_ids.dtype == np.int32
        assert prompt.text == chat_tokenizer.decode(whole[-limit:]) and prompt.text.endswith("\nassistant: ")
    assert not prompts[3].text.startswith("user: ") and "The question" not in prompts[3].text


def test_a_limit_that_all_prompts_keep_changes_nothing(path, chat_tokenizer, lengths):
    loaded = [load(config(path, limit=max(lengths), overlong=rule), chat_tokenizer, "train")
              for rule in ("refuse", "drop", "truncate_left")]
    assert [overlong for _, overlong in loaded] == [None] * 3
    assert len({fingerprint(prompts) for prompts, _ in loaded}) == 1


def test_the_data_differ_for_a_resume(path, chat_tokenizer, lengths):
    """A resume under another rule or limit would train other prompts."""
    made = {fingerprint(load_prompts(config(path, limit=limit, overlong=rule), chat_tokenizer, "train"))
            for rule in ("drop", "truncate_left") for limit in (lengths[1], lengths[1] - 1)}
    assert len(made) == 4


def test_dropping_everything_is_an_error(path, chat_tokenizer, lengths):
    with pytest.raises(UserError, match="all 6 prompts are longer .* and data.overlong = drop leaves none") as caught:
        load(config(path, limit=min(lengths) - 1, overlong="drop"), chat_tokenizer, "train")
    assert f"rollout.max_prompt_tokens={min(lengths)} or more" in caught.value.fix and str(path) in caught.value.where
