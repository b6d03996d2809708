"""Renders and tokenises prompts, and decodes completions. No other module does.

The driver renders and tokenises each prompt once. Engines and trainer receive ids (`Prompt.token_ids`) and never see
text. Engines also load the tokenizer to decode their samples. `RolloutEngine.facts` reports its fingerprint, and the
driver rejects a fingerprint that differs from its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from launch.errors import UserError

Message = dict[str, str]
PROBE = "0123456789"
"""An answer that does not occur in any template."""


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. Never downloads, and never runs code from the folder."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{folder} holds no tokenizer (no tokenizer.json)", where=f"model.path: {folder}",
                        fix="copy the tokenizer files of the model into the folder")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {error}", where=f"model.path: {folder}",
                        fix="copy the model's tokenizer.json and tokenizer_config.json again") from error


class PromptTemplate:
    """Renders rows and decodes completions of one run with one tokenizer.

    `chat_template="auto"` uses the tokenizer's own template if it has one. `"none"` uses the prompt's text unchanged,
    with only the special tokens that the tokenizer adds. `system` precedes a `prompt`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str = "auto",
                 system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat = chat_template == "auto" and bool(tokenizer.chat_template)
        self.system = system
        if system is not None and not self.chat:
            raise UserError("data.system needs a chat template, and this run has none",
                            where="data.system, data.chat_template",
                            fix="remove data.system, write it into the prompts, or use a model with a chat template")

    def render(self, prompt: str | Sequence[Message]) -> str:
        """Render the text that the model reads, including the generation prompt.

        A string becomes one user message after the system message. A list of messages is rendered unchanged, and the
        system message is added only if the list has none. Raises UserError if the template rejects the messages.
        """
        if isinstance(prompt, str):
            if not self.chat:
                return prompt
            messages: list[Message] = [{"role": "user", "content": prompt}]
        else:
            if not self.chat:
                raise UserError("chat messages need a chat template, and this run has none",
                                where="data.messages_column, data.chat_template",
                                fix="use data.chat_template=auto with a model that has one, or a prompt column")
            messages = list(prompt)
        if self.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return self._apply(messages, add_generation_prompt=True)

    def tokenize(self, text: str) -> np.ndarray:
        """int32 [P] ids of a rendered prompt. No special tokens are added to a chat template, which writes its own."""
        ids = self.tokenizer(text, add_special_tokens=not self.chat)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode int [R] ids of a completion for rewards and people, without special tokens, with spaces exactly as in
        the tokens. Do not tokenise the text again."""
        return str(self.tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=True,
                                         clean_up_tokenization_spaces=False))

    def text_of(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode int [P] ids of a prompt, special tokens included."""
        return str(self.tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=False,
                                         clean_up_tokenization_spaces=False))

    def fingerprint(self) -> str:
        """16 hex digits over everything that affects how rows become ids and ids become text: vocabulary, merges,
        normaliser, special tokens, chat template and system message. They are read from the loaded tokenizer, so the
        fingerprint also covers the loader. It must be equal on both sides for the run to start.
        """
        tokenizer = self.tokenizer
        parts = {
            "tokenizer": _serialised(tokenizer),
            "special": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
            "template": tokenizer.chat_template if self.chat else None,
            "system": self.system,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def check_end_token(self, stop_ids: Sequence[int]) -> None:
        """Reject a template with which the policy cannot learn to stop.

        The token that ends an assistant's turn must be a stop token of sampling. It is then the last token of the
        completion and inside the loss. A template that writes it in the next message puts it outside the loss, and the
        policy never learns to stop (TRL#5988). Without a chat template there is nothing to check.
        """
        if not self.chat:
            return
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}
        _, found_answer, end_text = self._apply([question, answer], add_generation_prompt=False).rpartition(PROBE)
        if not found_answer:
            raise UserError("the chat template omits the assistant's answer", where="data.chat_template",
                            fix="use a template that renders assistant messages, or data.chat_template=none")
        end_ids = self.tokenizer(end_text, add_special_tokens=False)["input_ids"]
        names = self.tokenizer.convert_ids_to_tokens(list(stop_ids))
        if not end_ids or end_ids[0] not in stop_ids:
            found = repr(end_text) if end_text else "nothing"
            raise UserError(f"the chat template ends an assistant's turn with {found}, but sampling stops at "
                            f"{names}: the end of an answer would lie outside the loss",
                            where="data.chat_template, generation_config.json: eos_token_id",
                            fix="add the token that ends the turn to eos_token_id in generation_config.json, or "
                            "write an end token right after the assistant's content in the chat template")

    def check_visible(self, tags: Iterable[str]) -> None:
        """Reject tags that `decode` leaves out of the text. A reward would look for them in vain.

        Raises:
            UserError: a tag is a special token.
        """
        hidden = [tag for tag in tags if tag in self.tokenizer.all_special_tokens]
        if hidden:
            raise UserError(f"the tokenizer has {' and '.join(hidden)} as special tokens, which are not in the text of "
                            "a completion, so a reward cannot cut off the thinking there",
                            where="reward.functions: args.thinking",
                            fix="set args: {thinking: null} and let the reward see the thinking, or mark the tokens as "
                                "not special in tokenizer.json and tokenizer_config.json")

    def _apply(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False,
                                                          add_generation_prompt=add_generation_prompt))
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            roles = [message.get("role") for message in messages]
            raise UserError(f"the tokenizer's chat template rejects messages with roles {roles}: {error}",
                            where="data.chat_template", fix="use the roles that the template accepts") from error


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> tuple[int, ...]:
    """Ids at which sampling stops: `eos_token_id` of generation_config.json (one or several) and of the tokenizer.

    The ids are ascending and unique. Raises UserError if there are none, since no completion would ever end.
    """
    ids = {tokenizer.eos_token_id} - {None}
    if (Path(folder) / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(configured if isinstance(configured, list) else [configured]) - {None}
    if not ids:
        raise UserError(f"{folder} names no end token", where="generation_config.json, tokenizer_config.json",
                        fix="set eos_token_id in generation_config.json")
    return tuple(sorted(ids))


def _serialised(tokenizer: PreTrainedTokenizerBase) -> dict | str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    state = json.loads(backend.to_str())
    # Calls with truncation or padding leave these settings in the tokenizer. They do not affect the vocabulary.
    return {key: value for key, value in state.items() if key not in ("truncation", "padding")}
