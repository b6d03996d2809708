"""Tiny model folders in Hugging Face's format: for tests, and for the policies that start from random weights.

    python -m megatron_rl.models tiny configs/tiny/model --tokenizer characters --vocab 64 --initializer-range 0.08
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from launch.model.family import built_in

FAMILIES = {family.model_type: family.architecture for family in built_in().values() if family.trains}
"""Families with tiny models, and the class of transformers for each."""
PAD, BOS, EOS, UNK = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
CHARACTERS = "\n 0123456789abcdefghijklmnopqrstuvwxyz.,:;?!+-*/=()<>'\"#%&_|"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, 259 in total. Any text can be tokenised, and nothing is merged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3 + len(alphabet), initial_alphabet=sorted(alphabet),
                                  special_tokens=[PAD, BOS, EOS], show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 64 in total: a vocabulary that a random policy can explore. It has no chat template."""
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS,
                                   unk_token=UNK)


TOKENIZERS = {"bytes": byte_tokenizer, "characters": character_tokenizer}


def tiny_config(family: str, **overrides) -> PretrainedConfig:
    """Two layers, hidden 128, four heads of 32, two KV heads; `overrides` are keys of the family's own config.

    32 is the smallest head size that vLLM's CPU attention supports.
    """
    settings = dict(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-6,
        rope_theta=10000.0, initializer_range=0.02, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, sliding_window=None)
    config_class = getattr(transformers, FAMILIES[family]).config_class
    for name in ("head_dim", "sliding_window"):
        if not hasattr(config_class, name):
            del settings[name]
    return config_class(**{**settings, **overrides}, architectures=[FAMILIES[family]])


def random_model(config: PretrainedConfig, seed: int, *, lively: bool = False) -> PreTrainedModel:
    """The model of `config` in fp32 with weights drawn from `seed`.

    `lively` also draws norms and biases and widens the rest. No two parameters of a kind are then equal, so a swapped
    or forgotten one changes the logits (for tests).
    """
    model_class = getattr(transformers, config.architectures[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        if lively:
            _draw_everything(model)
    return model.eval()


def _draw_everything(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, 0.1)


def write_tiny(folder: str | Path, family: str = "llama", seed: int | None = 0, *, tokenizer: str = "bytes",
               lively: bool = False, dtype: torch.dtype = torch.float32, **overrides) -> Path:
    """Write config.json, generation_config.json, tokenizer files and, unless `seed` is None, model.safetensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    config.dtype = dtype
    if seed is None:
        config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    else:
        random_model(config, seed, lively=lively).to(dtype).save_pretrained(folder)
    TOKENIZERS[tokenizer]().save_pretrained(folder)
    return folder
