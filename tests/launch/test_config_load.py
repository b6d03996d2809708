from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.config.keys import SYNONYMS, all_keys, nearest
from launch.config.load import load_config
from launch.config.show import as_json, rows
from launch.errors import UserError


def line_of(file, text: str) -> int:
    lines = file.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))


def test_values_and_their_sources(run_yaml):
    loaded = load_config(run_yaml, ["run.steps=7", "reward.functions.0.weight=2", "algorithm.kl.beta=1e-3"])
    assert loaded.config.run.steps == 7 and loaded.config.trainer.optimizer.lr == 1e-3
    assert loaded.config.reward.functions[0].weight == 2.0 and loaded.config.algorithm.kl.beta == 1e-3
    sources = {key: str(source) for key, source in loaded.sources.items()}
    assert sources["run.steps"] == "override 'run.steps=7'"
    assert sources["reward.functions.0.weight"] == "override 'reward.functions.0.weight=2'"
    assert sources["reward.functions.0.function"] == f"{run_yaml}:{line_of(run_yaml, '- function')}"
    assert sources["trainer.optimizer.lr"] == f"{run_yaml}:{line_of(run_yaml, 'lr:')}"
    assert sources["trainer.cp"] == "auto (on this machine)" and sources["trainer.threads"] == "default"
    assert loaded.where("trainer.tp") == f"{run_yaml}:{line_of(run_yaml, 'tp: 2')}, trainer.tp"


def test_a_later_override_wins_and_a_whole_section_can_be_given(run_yaml):
    loaded = load_config(run_yaml, ["run.steps=7", "run.steps=8", "checkpoint={every: 3, keep: 1}",
                                    "reward.functions=[{function: math, args: {digits: 2}}]"])
    assert loaded.config.run.steps == 8
    assert loaded.config.checkpoint.every == 3
    assert loaded.config.reward.functions[0].args == {"digits": 2}
    assert str(loaded.sources["run.steps"]) == "override 'run.steps=8'"
    assert str(loaded.sources["reward.functions.0.weight"]) == "default"
    assert "override 'reward.functions=" in str(loaded.sources["reward.functions.0.args.digits"])
    assert "override 'checkpoint=" in str(loaded.sources["checkpoint.keep"])


def test_a_section_that_an_override_replaces_loses_its_lines(run_yaml):
    loaded = load_config(run_yaml, ["rollout.max_new_tokens=3",
                                    "rollout={dtype: bf16, max_prompt_tokens: 4, max_new_tokens: 5}"])
    assert loaded.config.rollout.max_new_tokens == 5
    assert "override 'rollout={" in str(loaded.sources["rollout.max_new_tokens"])
    loaded = load_config(run_yaml, ["trainer.optimizer={lr: 1}", "trainer.optimizer.lr=2"])
    assert loaded.config.trainer.optimizer.lr == 2
    assert str(loaded.sources["trainer.optimizer.lr"]) == "override 'trainer.optimizer.lr=2'"
    assert str(loaded.sources["trainer.optimizer.min_lr"]) == "default"


BAD_FILES = [
    # what is changed in the file, what the message holds
    ("  steps: 100", "  step: 100", ["unknown key run.step", "did you mean run.steps?", "{file}:3, run.step",
                                     "run.steps is missing", "add run.steps: integer > 0"]),
    ("    lr: 1e-3", "    lr: 1e-3\n  lr: 1", ["unknown key trainer.lr", "did you mean trainer.optimizer.lr?"]),
    ("  tp: 2", "  qqq: 2", ["unknown key trainer.qqq", "valid here: tp, pp, vpp"]),
    ("  tp: 2", "  tp: '2'", ["trainer.tp = '2' (text) is not valid", "expected: integer > 0", "{file}:8"]),
    ("  tp: 2", "  tp: 2.0", ["trainer.tp = 2.0 (number)", "expected: integer > 0"]),
    ("  tp: 2", "  tp: true", ["trainer.tp = true (true or false)", "expected: integer > 0"]),
    ("  tp: 2", "  tp: 0", ["trainer.tp = 0 (integer) is not valid", "expected: integer > 0"]),
    ("  tp: 2", "  tp:", ["trainer.tp = null is not valid", "expected: integer > 0"]),
    ("  dtype: fp32\n  token", "  dtype: fp16\n  token", ["trainer.dtype = 'fp16'", "expected: one of fp32, bf16"]),
    ("    lr: 1e-3", "    lr: .nan", ["trainer.optimizer.lr = nan", "expected: number > 0"]),
    ("    lr: 1e-3", "    lr: .inf", ["trainer.optimizer.lr = inf", "expected: number > 0"]),
    ("    lr: 1e-3", "    lr: fast", ["trainer.optimizer.lr = 'fast' (text)", "expected: number > 0"]),
    ("  group_size: 8", "  group_size: 1", ["algorithm.group_size = 1", "no group", "use 2 or more"]),
    ("    - function: exact_match", "    []", ["reward.functions = []", "expected: list of sections, at least 1"]),
    ("    - function: exact_match", "    - weight: 1", ["reward.functions.0.function is missing",
                                                        "add reward.functions.0.function: text"]),
    ("  name: small", "  name: ../up", ["run.name = '../up'", "expected: text matching"]),
    ("run:\n", "run: []\nruns:\n", ["run = [] (list) is not valid", "expected: section", "unknown key runs"]),
]


@pytest.mark.parametrize("old, new, fragments", BAD_FILES, ids=[new.strip()[:30] for _, new, _ in BAD_FILES])
def test_bad_file(run_yaml, cli, old, new, fragments):
    text = run_yaml.read_text()
    assert old in text
    run_yaml.write_text(text.replace(old, new, 1))
    code, out, err = cli("config", "show", run_yaml)
    assert code == 2 and out == ""
    for fragment in fragments:
        assert fragment.replace("{file}", str(run_yaml)) in err


BAD_OVERRIDES = [
    ("run.step=5", ["unknown key run.step", "override 'run.step=5'", "did you mean run.steps?"]),
    ("trainr.tp=2", ["unknown key trainr", "override 'trainr.tp=2'", "did you mean trainer?"]),
    ("max_new_tokens=2", ["unknown key max_new_tokens", "did you mean rollout.max_new_tokens?"]),
    ("run.steps=many", ["run.steps = 'many' (text)", "override 'run.steps=many'", "expected: integer > 0"]),
    ("run.steps", ["'run.steps' is not an override", "key=value"]),
    ("=5", ["'=5' is not an override"]),
    ("run..steps=5", ["'run..steps=5' is not an override"]),
    ("data.train=[a", ["is not a YAML value", "close the bracket"]),
    ("reward.functions.1.weight=2", ["reward.functions has no item 1", "valid: 0 to 0"]),
    ("reward.functions.first.weight=2", ["reward.functions has no item first"]),
    ("run.name.x=2", ["run.name = 'small' is a value and has no key x", "run.name=..."]),
    ("trainer.tp=two", ["trainer.tp = 'two' (text)", "integer > 0 or auto"]),
]


@pytest.mark.parametrize("word, fragments", BAD_OVERRIDES, ids=[word for word, _ in BAD_OVERRIDES])
def test_bad_override(run_yaml, cli, word, fragments):
    code, out, err = cli("config", "show", run_yaml, word)
    assert code == 2 and out == ""
    for fragment in fragments:
        assert fragment in err


def test_all_errors_at_once(run_yaml, cli):
    run_yaml.write_text(run_yaml.read_text().replace("  tp: 2", "  tpp: 2\n  pp: two", 1).replace("  pp: 2\n", "", 1))
    code, _, err = cli("config", "show", run_yaml, "run.steps=0")
    assert code == 2 and err.startswith(f"error: 3 errors in {run_yaml}")
    for fragment in ("unknown key trainer.tpp", "trainer.pp = 'two'", "run.steps = 0"):
        assert fragment in err


@pytest.mark.parametrize("spoil, fragments", [
    (lambda file: file.unlink(), ["no configuration file"]),
    (lambda file: (file.unlink(), file.mkdir()), ["is a folder"]),
    (lambda file: file.write_bytes(b"\xff\xfe\x00"), ["cannot read"]),
    (lambda file: file.write_text(""), ["run is missing", "trainer is missing"]),
    (lambda file: file.write_text("just text"), ["a run's configuration is a mapping of sections"]),
    (lambda file: file.write_text("- 1\n- 2"), ["a run's configuration is a mapping of sections"])])
def test_no_usable_file(run_yaml, cli, spoil, fragments):
    spoil(run_yaml)
    code, _, err = cli("config", "show", run_yaml)
    assert code == 2 and str(run_yaml) in err
    for fragment in fragments:
        assert fragment in err


def test_nearest_key():
    assert nearest(("trainer", "tpp")) == "trainer.tp"
    assert nearest(("trainer", "optimizer", "learning_rate")) == "trainer.optimizer.lr"
    assert nearest(("trainer", "learning_rate")) == "trainer.optimizer.lr"
    assert nearest(("trainer", "tensor_model_parallel_size")) == "trainer.tp"
    assert nearest(("rollout", "gpu_memory_utilization")) == "rollout.memory_utilization"
    assert nearest(("beta",)) == "algorithm.kl.beta"
    assert nearest(("reward", "functions", 3, "wieght")) == "reward.functions.3.weight"
    assert nearest(("zzzzzz",)) is None


def test_show_prints_every_value_once_and_its_overrides_give_the_same_config(run_yaml, cli):
    loaded = load_config(run_yaml, ["run.steps=7"])
    table = rows(loaded)
    assert len({key for key, _, _ in table}) == len(table) == len(loaded.sources)
    words = [f"{key}={json.dumps(value)}" for key, value, _ in table]
    assert load_config(run_yaml, words).config == loaded.config
    code, out, _ = cli("config", "show", run_yaml, "run.steps=7")
    assert code == 0 and len(out.splitlines()) == len(table)
    assert next(line.split() for line in out.splitlines() if line.startswith("run.steps")) \
        == ["run.steps", "7", "override", "'run.steps=7'"]


def test_show_json_is_a_config_again(run_yaml, cli):
    code, out, _ = cli("config", "show", run_yaml, "--json", "run.seed=3")
    shown = json.loads(out)
    assert code == 0 and shown["path"] == str(run_yaml) and shown["sources"]["run.seed"] == "override 'run.seed=3'"
    again = run_yaml.with_name("again.yaml")
    again.write_text(yaml.safe_dump(shown["config"]))
    assert load_config(again).config == load_config(run_yaml, ["run.seed=3"]).config
    assert json.loads(as_json(load_config(run_yaml, ["run.seed=3"]))) == shown


def test_synonyms_lead_to_keys_that_exist():
    names = {key.dotted.rpartition(".")[2] for key in all_keys()}
    assert set(SYNONYMS.values()) <= names and not set(SYNONYMS) & names


def test_every_key_is_documented():
    assert [key.dotted for key in all_keys() if not key.field.description] == []


KEYS = [key.dotted.replace("*", "0") for key in all_keys()]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.builds("{}={}".format, st.sampled_from(KEYS) | st.text(max_size=12),
                          st.sampled_from(["1", "-1", "1e9", "x", "[]", "{}", "{a: {b: 1}}", "null", "[[", "true", "",
                                           "9" * 5000]) | st.text(max_size=12)), max_size=4))
def test_any_override_is_taken_or_refused(run_yaml, words):
    try:
        load_config(run_yaml, words)
    except UserError as error:
        assert error.exit_code == 2
