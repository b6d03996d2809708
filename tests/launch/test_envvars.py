from __future__ import annotations

import pytest

from launch import envvars
from launch.config.load import load_config


@pytest.fixture
def config(run_yaml):
    return load_config(run_yaml, ["trainer.threads=3"]).config


def test_every_row_reaches_a_process_and_is_explained(config):
    names = [each.name for each in envvars.TABLE]
    rows = [(each.name, role, device) for each in envvars.TABLE for role in each.roles for device in each.devices]
    assert len(set(rows)) == len(rows)
    assert all(each.why and each.roles and each.devices for each in envvars.TABLE)
    everything = {name for role in envvars.ROLES for device in ("cpu", "gpu")
                  for name in envvars.environment(role, device, config, job="j")}
    assert set(names) <= everything


def test_cpu_processes(config):
    trainer = envvars.environment("trainer", "cpu", config, job="small-1")
    rollout = envvars.environment("rollout", "cpu", config, job="small-1", address="10.0.0.1", interface="eth0")
    assert (trainer["OMP_NUM_THREADS"], rollout["OMP_NUM_THREADS"]) == ("3", "1")
    assert trainer["CUDA_VISIBLE_DEVICES"] == "" and "CUDA_DEVICE_MAX_CONNECTIONS" not in trainer
    assert trainer["GLOO_SOCKET_IFNAME"] == "lo" and rollout["GLOO_SOCKET_IFNAME"] == "eth0"
    assert rollout["VLLM_HOST_IP"] == "10.0.0.1" and "VLLM_HOST_IP" not in trainer
    assert trainer[envvars.JOB_MARK] == "small-1"


def test_gpu_processes(config):
    trainer = envvars.environment("trainer", "gpu", config, job="j", gpus=[5])
    rollout = envvars.environment("rollout", "gpu", config, job="j", gpus=[7, 6])
    driver = envvars.environment("driver", "gpu", config, job="j")
    assert trainer["CUDA_VISIBLE_DEVICES"] == "5" and rollout["CUDA_VISIBLE_DEVICES"] == "7,6"
    assert driver["CUDA_VISIBLE_DEVICES"] == ""
    assert (trainer["CUDA_DEVICE_MAX_CONNECTIONS"], rollout["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("1", "32")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in driver
    assert not any(name.startswith("VLLM_CPU") or name == "TORCHDYNAMO_DISABLE" for name in rollout)
    assert all(each["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1" for each in (trainer, rollout, driver))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_both_ends_of_the_weight_sync_agree(config, device):
    """verl#5522, SkyRL#143: NCCL and gloo settings that differ between the partitions hang the sync."""
    sides = [envvars.environment(role, device, config, job="j", gpus=[0]) for role in ("trainer", "rollout")]
    shared = [{name: value for name, value in side.items() if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL"))}
              for side in sides]
    assert shared[0] == shared[1] and "GLOO_SOCKET_IFNAME" in shared[0]


def test_secrets_are_masked_when_recorded():
    recorded = envvars.masked({
        "WANDB_API_KEY": "k1", "HF_TOKEN": "k2", "AWS_SECRET_ACCESS_KEY": "k3", "MY_PASSWORD": "k4",
        "GITHUB_PAT": "k5", "SSH_PRIVATE_KEY": "k6", "EMPTY_TOKEN": "",
        "http_proxy": "http://user:k7@proxy:3128", "PATH": "/bin",
        "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us"})
    assert not any(f"k{number}" in value for value in recorded.values() for number in range(1, 8))
    assert recorded["http_proxy"] == "http://***@proxy:3128" and recorded["EMPTY_TOKEN"] == ""
    assert (recorded["PATH"], recorded["TOKENIZERS_PARALLELISM"], recorded["KEYBOARD"]) == ("/bin", "false", "us")
    assert list(recorded) == sorted(recorded)


def test_masked_takes_this_process_by_default(monkeypatch):
    monkeypatch.setenv("SOME_SECRET", "hidden")
    assert envvars.masked()["SOME_SECRET"] == "***" and envvars.get("SOME_SECRET") == "hidden"
    assert "SOME_SECRET" not in envvars.inherited(without=["SOME_SECRET"])
