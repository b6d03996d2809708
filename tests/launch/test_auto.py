"""Keys that may be `auto`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.config import keys
from launch.config.load import ResolvedLoaded, load_config
from launch.config.resolved import KEYS, open_keys, with_values
from launch.model.padding import token_budget

CONFIGS = Path(__file__).parents[2] / "configs"
SEVENTY, TINY = CONFIGS / "70b" / "grpo.yaml", CONFIGS / "tiny" / "grpo.yaml"


def test_every_key_that_takes_auto_is_known():
    takes = {key.dotted for key in keys.all_keys() if "auto" in keys.type_in_words(key.field).split() or
             "auto" in keys.type_in_words(key.field).replace(",", " ").split()}
    stay = {"run.resume", "run.stop_margin_s", "data.chat_template", "trainer.share_prompts", "weight_sync.route",
            "trainer.overlap_param_gather", "trainer.gradient_accumulation_fusion"}
    assert set(KEYS) == takes - stay


def test_on_a_cluster_they_stay_open():
    config = load_config(SEVENTY).config
    assert set(open_keys(config)) >= {"trainer.tp", "trainer.dp", "rollout.replicas", "trainer.token_budget"}
    assert "trainer.tp" not in open_keys(load_config(SEVENTY, ["trainer.tp=4"]).config)


def test_on_this_machine_they_have_values():
    loaded = load_config(SEVENTY, ["cluster=local"])
    assert isinstance(loaded, ResolvedLoaded)
    assert (loaded.config.trainer.tp, loaded.config.rollout.replicas, loaded.config.placement.mode) == (
        1, 1, "disaggregated")
    assert loaded.config.trainer.token_budget == 512 + 8192
    assert loaded.where("trainer.tp").endswith("(auto)")
    assert load_config(TINY, ["trainer.tp=2"]).config.trainer.tp == 2


@pytest.mark.parametrize("multiple, expected", [(1, 8704), (64, 8704), (1000, 9000)])
def test_token_budget(multiple, expected):
    assert token_budget(512 + 8192, multiple) == expected
    assert token_budget(96) == 8192


@pytest.mark.parametrize("words, expected", [
    (["trainer.tp=1", "trainer.pp=1", "trainer.cp=3"], 8196), (["trainer.tp=1", "trainer.pp=1", "trainer.cp=2",
                                                               "rollout.max_new_tokens=9001"], 9008),
    (["trainer.sequence_parallel=true", "rollout.max_new_tokens=9001"], 9006)])
def test_the_token_budget_of_this_machine_suits_the_layout(words, expected):
    config = load_config(TINY, ["cluster=local", "trainer.token_budget=auto", *words]).config
    assert config.trainer.token_budget == expected


def test_with_values_changes_a_copy():
    config = load_config(SEVENTY).config
    changed = with_values(config, {"trainer.tp": 4, "algorithm.kl.reference_offload": True, "rollout.tp": 2})
    assert (changed.trainer.tp, changed.rollout.tp, changed.algorithm.kl.reference_offload) == (4, 2, True)
    assert (config.trainer.tp, config.rollout.tp, config.algorithm.kl.reference_offload) == ("auto", "auto", False)
    assert changed.trainer.optimizer == config.trainer.optimizer
