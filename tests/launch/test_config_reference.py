"""`megatron-rl config explain` and `config search` against the schema."""

from __future__ import annotations

import inspect
import json

import pytest
from pydantic_core import PydanticUndefined

from launch.config import reference, schema
from launch.config.keys import all_keys
from tests.planner.problems import ROOT


@pytest.mark.parametrize("key", list(all_keys()), ids=lambda key: key.dotted)
def test_every_key_is_explained(key):
    entry = reference.entry(reference.find(key.dotted))
    assert entry.key == key.dotted and entry.meaning and entry.type
    default = key.field.default
    if key.section is None and default is not PydanticUndefined and not isinstance(default, (dict, list)):
        assert entry.default.replace("null", "None").replace("true", "True").replace("false", "False") == str(default)
    assert (entry.default == "required") == key.field.is_required()


@pytest.mark.parametrize("key, section, kind, default", [
    ("rollout.temperature", schema.Rollout, "number > 0", "1.0"),
    ("trainer.recompute", schema.Trainer, "one of none, selective, full, auto", "auto"),
    ("algorithm.dual_clip", schema.Algorithm, "number > 1 or null", "null"),
    ("trainer.optimizer.lr", schema.Optimizer, "number > 0", "required"),
    ("reward.functions.*.weight", schema.RewardFunction, "number", "1.0")])
def test_type_default_and_text(cli, key, section, kind, default):
    code, out, _ = cli("config", "explain", key)
    assert code == 0 and out.splitlines()[0] == key
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  ")}
    assert lines["type"] == kind and lines["default"] == default
    documented = " ".join(inspect.getsource(section).split())       # the docstring under the field
    assert " ".join(out.split("\n\n")[0].split()[1:]) in documented


@pytest.mark.parametrize("word, key", [
    ("lr", "trainer.optimizer.lr"), ("learning_rate", "trainer.optimizer.lr"), ("kl_coef", "algorithm.kl.beta"),
    ("reward.functions.3.weight", "reward.functions.*.weight"), ("reward.functions.0", "reward.functions")])
def test_other_ways_to_name_a_key(cli, word, key):
    assert cli("config", "explain", word)[1].splitlines()[0] == key


def test_values_and_where_they_are_set(cli, run_yaml):
    line = 1 + run_yaml.read_text().splitlines().index("  token_budget: 64")
    assert f"64 ({run_yaml}:{line})" in cli("config", "explain", "trainer.token_budget", run_yaml)[1]
    out = cli("config", "explain", "trainer.token_budget", run_yaml, "trainer.token_budget=128")[1]
    assert "128 (override 'trainer.token_budget=128')" in out
    assert "0.2 (default)" in cli("config", "explain", "algorithm.clip_low", run_yaml)[1]
    assert "1 (auto (on this machine))" in cli("config", "explain", "trainer.dp", run_yaml)[1]
    out = cli("config", "explain", "reward.functions.0.function", run_yaml)[1]
    assert f"reward.functions.0.function = exact_match ({run_yaml}:" in " ".join(out.split())


def test_a_section_shows_its_keys_and_their_values(cli, run_yaml):
    document = json.loads(cli("config", "explain", "trainer.optimizer", run_yaml, "--json")[1])
    names = [f"trainer.optimizer.{name}" for name in schema.Optimizer.model_fields]
    assert document["members"] == names == list(document["values"])
    assert document["values"]["trainer.optimizer.lr"]["value"] == 1e-3


def test_auto_is_what_the_planner_chooses(cli, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = "configs/7b/grpo.yaml"
    plan = json.loads(cli("plan", config, "--json")[1])
    code, out, _ = cli("config", "explain", "trainer.tp", config)
    assert code == 0 and f"value    {plan['training']['tp']} (chosen by the planner; auto: " in out
    code, out, _ = cli("config", "explain", "trainer.tp", config, "trainer.pp=3")      # no such plan
    assert code == 0 and "value    auto (" in out and "auto is not resolved, because there is no plan" in out


@pytest.mark.parametrize("words, parts", [
    (("explain", "trainr.tp"), ("there is no key trainr.tp", "did you mean trainer.tp?")),
    (("explain", "tp"), ("2 keys are called tp", "trainer.tp or rollout.tp")),
    (("explain", "zork"), ("there is no key zork", "config search zork")),
    (("explain", "trainer.tp", "nowhere.yaml"), ("no configuration file nowhere.yaml",)),
    (("search", "zork"), ("no key has zork",)), (("search",), ("Missing argument",))])
def test_what_is_refused(cli, words, parts):
    code, out, err = cli("config", *words)
    assert code == 2 and out == "" and all(part in err for part in parts) and "Traceback" not in err


def test_search(cli):
    found = json.loads(cli("config", "search", "gpu", "MEMORY", "--json")[1])
    assert found[0]["key"] == "rollout.memory_utilization" and all("gpu" in each["meaning"].lower() for each in found)
    keys = [each["key"] for each in json.loads(cli("config", "search", "lr", "--json")[1])]
    assert keys[:2] == ["trainer.optimizer.lr", "trainer.optimizer.min_lr"] and len(keys) > 2   # names first
    by_other = json.loads(cli("config", "search", "num_generations", "--json")[1])
    assert [each["key"] for each in by_other] == ["algorithm.group_size"]
    out = cli("config", "search", "staleness")[1]
    assert out.startswith("algorithm.max_staleness  (auto or integer >= 0; default 0)\n")
