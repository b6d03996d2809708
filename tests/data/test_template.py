"""Rendering, tokenising, decoding, and the two traps of chat templates: drift and the lost end token."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from launch.errors import UserError
from megatron_rl.data.template import PromptTemplate, load_tokenizer, stop_token_ids

MESSAGES = [{"role": "user", "content": "Say 3."}, {"role": "assistant", "content": "3"},
            {"role": "user", "content": "Again."}]
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def chatml_tokenizer(*, eos: str = "<|im_end|>", pad: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Bytes, ChatML's special tokens, and by default pad = eos, as SmolLM2 and many others have it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad)
    fast.chat_template = CHATML
    return fast


def test_a_prompt_becomes_one_user_message_after_the_system_message():
    template = PromptTemplate(chatml_tokenizer(), system="Be brief.")
    assert template.render("Add 2 and 3.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nAdd 2 and 3.<|im_end|>\n<|im_start|>assistant\n")


def test_messages_keep_their_turns_and_their_own_system_message():
    template = PromptTemplate(chatml_tokenizer(), system="Be brief.")
    assert template.render(MESSAGES).count("<|im_start|>") == len(MESSAGES) + 2
    own = [{"role": "system", "content": "Be long."}, *MESSAGES]
    assert "Be brief." not in template.render(own)
    assert own[0]["content"] == "Be long." and len(own) == 4, "the row itself must not change"


@pytest.mark.parametrize("chat_template", ["auto", "none"])
def test_a_prompt_without_template_is_its_own_text(plain_tokenizer, chat_template):
    template = PromptTemplate(plain_tokenizer, chat_template=chat_template)
    assert template.render("max 3 7=") == "max 3 7="
    assert template.decode(template.tokenize("max 3 7=")) == "max 3 7="


def test_none_switches_an_existing_template_off(chat_tokenizer):
    assert PromptTemplate(chat_tokenizer, chat_template="none").render("hello") == "hello"


def test_ids_equal_what_transformers_makes_of_the_same_messages():
    tokenizer = chatml_tokenizer()
    template = PromptTemplate(tokenizer)
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = template.tokenize(template.render(MESSAGES))
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


def test_a_template_that_writes_bos_gets_no_second_one():
    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    from tokenizers.processors import TemplateProcessing
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)])
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    with_chat, without = PromptTemplate(tokenizer), PromptTemplate(tokenizer, chat_template="none")
    assert with_chat.tokenize(with_chat.render("hi")).tolist().count(tokenizer.bos_token_id) == 1
    assert without.tokenize("hi")[0] == tokenizer.bos_token_id


def test_completions_decode_without_special_tokens_and_with_all_spaces():
    tokenizer = chatml_tokenizer()
    ids = tokenizer("It 's  5 .", add_special_tokens=False)["input_ids"]
    decoded = PromptTemplate(tokenizer).decode(np.array([*ids, tokenizer.eos_token_id], dtype=np.int32))
    assert decoded == "It 's  5 ."


def test_two_token_sequences_can_decode_alike_so_text_is_never_tokenised_again():
    """Token drift (rllm#272): what the engine sampled, [a, b], is not what its text tokenises to, [ab]."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "<eos>": 3}, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    template = PromptTemplate(fast)
    assert template.decode([0, 1]) == template.decode([2]) == "ab"
    assert template.tokenize(template.decode([0, 1])).tolist() == [2]


def test_the_end_token_must_be_one_that_sampling_stops_at():
    """TRL#5988: an end token outside the sampled answer is outside the loss."""
    tokenizer = chatml_tokenizer(eos="<|endoftext|>")
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    template = PromptTemplate(tokenizer)
    with pytest.raises(UserError, match="outside the loss") as caught:
        template.check_end_token([tokenizer.eos_token_id])
    assert "generation_config.json" in caught.value.fix
    template.check_end_token([tokenizer.eos_token_id, im_end])


def test_an_end_token_that_the_next_message_writes_is_refused():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not loop.first %}<|im_end|>{% endif %}<|im_start|>{{ m['role'] }} "
        "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|im_end|><|im_start|>assistant {% endif %}")
    with pytest.raises(UserError, match="ends an assistant's turn with nothing"):
        PromptTemplate(tokenizer).check_end_token([tokenizer.eos_token_id])


def test_an_end_token_after_a_line_break_is_refused():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ '\n' }}<|im_end|>")
    with pytest.raises(UserError, match="outside the loss"):
        PromptTemplate(tokenizer).check_end_token([tokenizer.eos_token_id])


def test_a_generation_prompt_that_opens_a_thinking_block_is_fine():
    """Reasoning models open the block in the generation prompt and leave it out of finished turns."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_start|>assistant\n{% endif %}",
                                             "<|im_start|>assistant\n<think>{% endif %}")
    template = PromptTemplate(tokenizer)
    template.check_end_token([tokenizer.eos_token_id])
    assert template.render("hi").endswith("assistant\n<think>")


def test_a_template_without_assistant_turns_is_refused():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match="omits the assistant's answer"):
        PromptTemplate(tokenizer).check_end_token([tokenizer.eos_token_id])


def test_the_tiny_template_is_sound(chat_folder, chat_tokenizer):
    PromptTemplate(chat_tokenizer).check_end_token(stop_token_ids(chat_tokenizer, chat_folder))


def test_a_template_that_refuses_a_role_says_which():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(UserError, match=r"roles \['user'\].*no system role here"):
        PromptTemplate(tokenizer).render("hello")


def test_messages_without_a_template_are_refused(plain_tokenizer):
    with pytest.raises(UserError, match="need a chat template"):
        PromptTemplate(plain_tokenizer).render(MESSAGES)


def test_a_system_message_without_a_template_is_refused(plain_tokenizer):
    with pytest.raises(UserError, match="data.system needs a chat template"):
        PromptTemplate(plain_tokenizer, system="Be brief.")


def test_stop_ids_are_the_union_of_generation_config_and_tokenizer(chat_folder, chat_tokenizer, tmp_path):
    assert stop_token_ids(chat_tokenizer, chat_folder) == (2,)
    folder = tmp_path / "several"
    shutil.copytree(chat_folder, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [7, 5]}))
    assert stop_token_ids(chat_tokenizer, folder) == (2, 5, 7)
    file.unlink()
    assert stop_token_ids(chat_tokenizer, folder) == (2,)


def test_no_stop_id_at_all_is_refused(tmp_path):
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="names no end token"):
        stop_token_ids(tokenizer, tmp_path)


def test_the_fingerprint_survives_saving_and_a_padded_call(chat_folder, chat_tokenizer):
    before = PromptTemplate(chat_tokenizer).fingerprint()
    chat_tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert PromptTemplate(chat_tokenizer).fingerprint() == before
    assert PromptTemplate(load_tokenizer(chat_folder)).fingerprint() == before


def test_the_fingerprint_tells_every_difference_apart(chat_folder, plain_tokenizer):
    base = load_tokenizer(chat_folder)
    other_template = load_tokenizer(chat_folder)
    other_template.chat_template += " "
    other_eos = load_tokenizer(chat_folder)
    other_eos.eos_token = "<|bos|>"
    more_tokens = load_tokenizer(chat_folder)
    more_tokens.add_tokens(["<tool>"])

    def fingerprint(tokenizer, **options) -> str:
        return PromptTemplate(tokenizer, **options).fingerprint()

    without = fingerprint(base, chat_template="none")
    prints = [fingerprint(base), without, fingerprint(base, system="x"), fingerprint(other_template),
              fingerprint(other_eos), fingerprint(more_tokens), fingerprint(plain_tokenizer)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(other_template, chat_template="none") == without, "an unused template is no matter"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_refused(chat_folder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(chat_folder, folder)
    (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(folder)


def test_tags_that_the_text_leaves_out_are_refused(chat_tokenizer):
    """The text of a completion has no special tokens, which some models make of their thinking's tags."""
    chat_tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]"]})
    chat_tokenizer.add_tokens(["<think>"])
    template = PromptTemplate(chat_tokenizer)
    ids = chat_tokenizer("<think>[THINK]", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2 and template.decode(ids) == "<think>"
    template.check_visible(["<think>"])
    with pytest.raises(UserError, match=r"has \[THINK\] as special tokens"):
        template.check_visible(["[THINK]", "[/THINK]"])
