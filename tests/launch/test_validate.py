"""`megatron-rl validate CONFIG`: what is valid, what is only a warning, and the old spelling of `plan accuracy`."""

from __future__ import annotations

import json

import pytest

from launch.exit_codes import ExitCode
from tests.launch.conftest import RUN_YAML
from tests.planner.problems import ROOT

SMALL = "configs/7b/grpo.yaml"


def of_file(text: str) -> int:
    """Number of values in a YAML text with one value per line: the lines that do not open a section."""
    return sum(not line.rstrip().endswith(":") for line in text.splitlines())


def test_a_valid_configuration(run_yaml, cli):
    code, out, err = cli("validate", run_yaml, "trainer.dp=2", "--device", "cpu")
    assert code == 0 and err == ""
    assert out.splitlines()[-1].startswith(f"{run_yaml} is valid, with ")
    warned = [line.split()[1] for line in out.splitlines() if line.startswith("warning")]
    out = " ".join(out.split())             # a long path of the test's folder wraps lines elsewhere
    assert f"{of_file(RUN_YAML)} from the file, 1 override, " in out
    assert "4 layers" in out and "8 training ranks, 1 engine of TP 1" in out      # tp 2 x pp 2 x dp 2
    # no tokenizer in the folder, data there
    assert "model:" in warned and "data:" not in warned


def test_it_warns_of_what_the_plan_warns(cli, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, err = cli("validate", SMALL, "reward.on_error=stop", "--json")
    document = json.loads(out)
    assert code == 0 and err == "" and document["valid"] is True and document["error"] is None
    plan = json.loads(cli("plan", SMALL, "reward.on_error=stop", "--json")[1])
    codes = [each["code"] for each in plan["forecast"]["warnings"]]
    assert codes[0].startswith("W") and codes[-1] == "MATH_STOP"
    assert [each["subject"] for each in document["warnings"]][-len(codes):] == codes
    assert [each["subject"] for each in document["checked"]] == ["keys", "model", "agreement", "plan"]
    assert f"{plan['forecast']['throughput']['nominal']:,.0f} prompts/h" in document["checked"][-1]["evidence"]


def test_what_a_run_needs_and_a_plan_does_not_is_a_warning(run_yaml, cli):
    """As on a login node: config.json without weights, data elsewhere; and what is planned only."""
    code, out, _ = cli("validate", run_yaml, "model.init=load", "data.train=elsewhere.jsonl",
                       "model.lora_rank=8", "--device", "cpu", "--json")
    warnings = {each["subject"]: each for each in json.loads(out)["warnings"]}
    assert code == 0
    assert "elsewhere.jsonl does not exist" in warnings["data"]["what"]
    assert "data.train=elsewhere.jsonl" in warnings["data"]["where"]
    assert "tokenizer" in warnings["model"]["what"] or "weights" in warnings["model"]["what"]
    assert "model.lora_rank = 8 can be planned" in warnings["run"]["what"]


@pytest.mark.parametrize("words, code, parts", [
    (("trainer.tp=3",), ExitCode.USER_ERROR, ("trainer.tp = 3 does not divide the 8 attention heads",)),
    (("trainer.tensor=3", "run.steps=many"), ExitCode.USER_ERROR, ("2 errors", "trainer.tensor", "run.steps")),
    (("model.path=nowhere",), ExitCode.USER_ERROR, ("nowhere does not exist",))])
def test_what_is_not_valid(run_yaml, cli, words, code, parts):
    found = cli("validate", run_yaml, *words, "--device", "cpu")
    assert found == cli("plan", run_yaml, *words, "--device", "cpu")      # in the same words
    assert found[0] == code and found[1] == "" and all(part in found[2] for part in parts)
    found = cli("validate", run_yaml, *words, "--device", "cpu", "--json")
    document = json.loads(found[1])
    assert found[0] == code == document["error"]["exit_code"] and document["valid"] is False
    assert all(part in document["error"]["what"] for part in parts) and found[2] == ""


def test_no_plan_fits(cli, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, err = cli("validate", "configs/70b/grpo.yaml", "cluster=configs/clusters/h100x1.yaml")
    assert code == ExitCode.NO_FEASIBLE_PLAN and out == "" and "no plan fits" in err


@pytest.mark.parametrize("old, new", [
    ((), ""), (("--json",), " --json"), (("benchmarks/measured",), " benchmarks/measured"),
    (("benchmarks/measured", "--kind", "decode", "--no-leave-out", "--json"),
     " benchmarks/measured --kind decode --no-leave-out --json")])
def test_the_old_spelling_is_answered_with_plan_accuracy(cli, monkeypatch, old, new):
    monkeypatch.chdir(ROOT)
    code, out, err = cli("validate", *old)
    assert code == ExitCode.USER_ERROR and out == ""
    assert err.rstrip().endswith(f"To compare measured points, use megatron-rl plan accuracy{new}")
