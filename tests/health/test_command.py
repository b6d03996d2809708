"""`megatron-rl preflight` as a user runs it: on this machine, which the simulation gives GPUs."""

from __future__ import annotations

import importlib.util
import json

import pytest

from launch import envvars
from launch.health.ledger import Ledger


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch, tmp_path):
    for name in list(envvars.inherited()):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def simulated(monkeypatch, tmp_path):
    def write(faults: dict) -> None:
        file = tmp_path / "hardware.json"
        file.write_text(json.dumps({"nodes": {"n1": faults}}))
        monkeypatch.setenv(envvars.SIMULATED_GPUS, str(file))
    return write


@pytest.fixture
def run_here(run_yaml, tmp_path):
    """A run that this machine could make, but for the libraries that may not be installed."""
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return [run_yaml, f"run.dir={tmp_path / 'runs'}"]


def test_login(cli, run_here, tmp_path):
    code, out, err = cli("preflight", *run_here, "--tier", "login", "--device", "cpu")
    assert code == 0 and err == "" and "the job may start" in out and max(map(len, out.splitlines())) <= 100
    assert {path.name for path in tmp_path.iterdir()} == {"model", "run.yaml", "train.jsonl"}   # nothing is left
    code, out, _ = cli("preflight", *run_here, "--tier", "login", "--device", "cpu", "--json")
    document = json.loads(out)
    names = {check["check"]: check["severity"] for check in document["verdict"]["job"]}
    assert code == 0 and document["schema_version"] == 1 and set(names.values()) == {"ok"}
    assert set(names) == {"config.valid", "plan.feasible", "paths.model", "paths.data", "paths.run_dir",
                          "stack.installed"}


@pytest.mark.parametrize("word, name, fragment", [
    ("trainer.tpp=2", "config.valid", "unknown key trainer.tpp"),
    ("trainer.tp=3", "plan.feasible", "does not divide"),
    ("data.train=absent.jsonl", "paths.data", "does not exist"),
    ("model.init=load", "paths.model", "model.safetensors"),
    ("run.dir=/proc/runs", "paths.run_dir", "cannot write /proc")])
def test_what_login_finds(cli, run_here, word, name, fragment):
    code, out, err = cli("preflight", *run_here, word, "--tier", "login", "--device", "cpu", "--json")
    verdict = json.loads(out)["verdict"]
    found = {check["check"]: check for check in verdict["job"] if check["severity"] == "critical"}
    assert code == 5 and name in found and fragment in found[name]["evidence"] and found[name]["remedy"]
    assert not verdict["ok"] and "Traceback" not in err


def test_a_healthy_node_without_a_configuration(cli, simulated):
    simulated({})
    code, out, _ = cli("preflight")
    assert code == 0 and "1 of 1 nodes are fit" in out and "--exclude" not in out


def test_a_bad_node(cli, simulated):
    simulated({"gpus": {"2": {"ecc_uncorrected": 4}}})
    code, out, _ = cli("preflight")
    assert code == 5 and "CRIT n1: gpu.ecc" in out and out.splitlines()[-1] == "--exclude=n1"
    code, out, _ = cli("preflight", "--json")
    document = json.loads(out)
    assert code == 5 and document["exclude"] == "n1" and document["verdict"]["excluded"][0]["node"] == "n1"
    assert {check["check"]: check["severity"] for check in document["nodes"]["n1"]}["gpu.ecc"] == "critical"
    code, out, _ = cli("preflight", "--skip", "gpu.ecc")
    assert code == 0 and "(skipped)" in out


def test_the_ledger_is_told_of(cli, simulated, tmp_path):
    simulated({})
    Ledger(tmp_path / "ledger.json").add("n1", "gpu.ecc: 4 errors", "e.json", "7")
    code, out, _ = cli("preflight", "--ledger", tmp_path / "ledger.json", "--json")
    assert code == 0 and "n1 is in the ledger (gpu.ecc: 4 errors)" in json.loads(out)["verdict"]["warnings"][0]


def test_words_without_a_configuration(cli):
    code, _, err = cli("preflight", "run.steps=3")
    assert code == 2 and "name a configuration first" in err


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_fabric_on_this_machine(cli, run_here, monkeypatch, tmp_path):
    """Two processes on the CPU, the real program."""
    monkeypatch.setenv("PYTHONPATH", str(pytest.importorskip("launch").__path__[0].rsplit("/", 1)[0]))
    code, out, err = cli("preflight", "--tier", "fabric", "--device", "cpu", "--json")
    checks = {check["check"]: check for check in json.loads(out)["nodes"]["n1"]}
    assert code == 0, err
    assert checks["fabric.allreduce"]["severity"] == "ok" and checks["fabric.allreduce"]["value"] > 1e6
