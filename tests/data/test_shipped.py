"""The data sets and the tiny model that the repository ships: right, disjoint, and what their generators make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.config.load import load_config
from launch.model.folder import check_model_folder
from megatron_rl.data import make_digits, make_sums
from megatron_rl.data.dataset import load_prompts
from megatron_rl.data.template import PromptTemplate, load_tokenizer, stop_token_ids
from megatron_rl.models.tiny import write_tiny
from tests.real_model import smollm2_folder

SETS = pytest.mark.parametrize(("folder", "generator"), [("configs/tiny", make_digits), ("configs/135m", make_sums)])


def rows(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def numbers(row: dict) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", row["prompt"]))


@SETS
def test_the_committed_files_are_what_the_generator_makes(folder, generator):
    assert (rows(f"{folder}/train.jsonl"), rows(f"{folder}/eval.jsonl")) == generator.make()


@SETS
def test_no_question_comes_twice(folder, generator):
    prompts = [row["prompt"] for split in generator.make() for row in split]
    assert len(set(prompts)) == len(prompts)


def test_answers_are_right():
    for split in ("train", "eval"):
        assert all(int(row["answer"]) == sum(numbers(row)) for row in rows(f"configs/135m/{split}.jsonl"))
        assert all(int(row["answer"]) == max(numbers(row)) for row in rows(f"configs/tiny/{split}.jsonl"))


def test_held_out_sums_share_no_operands_with_training():
    train, held_out = ({tuple(sorted(numbers(row))) for row in split} for split in make_sums.make())
    assert not train & held_out
    assert len(make_sums.make()[0]) >= 2000 and len(make_sums.make()[1]) >= 200


def test_every_prompt_of_the_tiny_run_loads():
    config = load_config("configs/tiny/grpo.yaml", []).config
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config, tokenizer, "train") + load_prompts(config, tokenizer, "eval")
    assert len(prompts) == 100
    assert not any(tokenizer.unk_token_id in prompt.token_ids for prompt in prompts)
    assert max(len(prompt.token_ids) for prompt in prompts) == config.rollout.max_prompt_tokens
    answers = [tokenizer(prompt.answer)["input_ids"] for prompt in prompts]
    assert max(map(len, answers)) + 1 == config.rollout.max_new_tokens, "the answer and the end token"


@pytest.mark.slow
def test_every_question_of_the_135m_run_loads():
    config = load_config("configs/135m/grpo.yaml", [f"model.path={smollm2_folder()}"]).config
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(config, tokenizer, "train") + load_prompts(config, tokenizer, "eval")
    assert len(prompts) == 2304
    assert all(prompt.text.endswith("<|im_start|>assistant\n") for prompt in prompts)
    PromptTemplate(tokenizer).check_end_token(stop_token_ids(tokenizer, config.model.path))


def test_the_tiny_model_is_what_its_command_makes(tmp_path):
    shipped = Path("configs/tiny/model")
    made = write_tiny(tmp_path / "model", "llama", None, tokenizer="characters", vocab_size=64,
                      initializer_range=0.08)
    assert {file.name for file in shipped.iterdir()} == {file.name for file in made.iterdir()}
    for file in made.iterdir():
        ours, theirs = (json.loads((folder / file.name).read_text()) for folder in (made, shipped))
        version = {"transformers_version": None}
        assert {**ours, **version} == {**theirs, **version}, file.name
    assert check_model_folder(shipped, weights=False).vocab == 64
