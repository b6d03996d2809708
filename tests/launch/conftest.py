"""A valid run of a small model in a temporary folder. Each test breaks it in one way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.cli.main import main
from launch.model.hf_config import from_hf_dict

HF_CONFIGS = Path(__file__).parent / "hf_configs"

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 96,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu"}

RUN_YAML = """\
run:
  name: small
  steps: 100
model:
  path: {model}
  init: random
trainer:
  tp: 2
  pp: 2
  dtype: fp32
  token_budget: 64
  optimizer:
    lr: 1e-3
rollout:
  dtype: fp32
  max_prompt_tokens: 16
  max_new_tokens: 8
algorithm:
  group_size: 8
  prompts_per_step: 16
reward:
  functions:
    - function: exact_match
data:
  train: {data}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_MODEL))
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(RUN_YAML.format(model=model, data=data))
    return file


@pytest.fixture
def tiny_architecture():
    return from_hf_dict(TINY_MODEL)


@pytest.fixture
def cli(capsys):
    """Runs `megatron-rl` in this process: (exit code, stdout, stderr)."""
    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err
    return run
