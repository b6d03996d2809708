from __future__ import annotations

import pytest

from megatron_rl.data.template import load_tokenizer
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A model folder whose tokenizer has a chat template and no merges."""
    return make_tiny(tmp_path_factory.mktemp("models") / "chat", "llama", 0)


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory):
    """A model folder whose tokenizer has no chat template: one token a character."""
    return make_tiny(tmp_path_factory.mktemp("models") / "plain", "llama", 0, tokenizer="characters", vocab_size=64)


@pytest.fixture
def chat_tokenizer(chat_folder):
    return load_tokenizer(chat_folder)


@pytest.fixture
def plain_tokenizer(plain_folder):
    return load_tokenizer(plain_folder)
