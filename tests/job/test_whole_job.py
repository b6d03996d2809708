"""Real jobs of the tiny configuration: Ray, Megatron at TP2, vLLM, rewards, weight sync, checkpoints; one at TP2 x PP2
with an engine at TP2. (A job at PP2: tests/slurm/test_real_job.py. Stop, kill and resume: test_async_job.py.)"""

from __future__ import annotations

import json
import re
import shutil
from statistics import fmean, median

import pytest
from safetensors.torch import load_file

from launch import envvars
from launch.planner.calibrate.calibrate import calibrate
from launch.planner.prepare import prepare
from megatron_rl.layouts.disk_check import recorded_digests
from tests.job.runner import CONFIG, Launched, evaluation, launch
from tests.tiny_models import make_tiny

STEPS = 24
DETERMINISTIC = (f"run.steps={STEPS}", "trainer.pp=1", "rollout.deterministic=true", "checkpoint.every=4",
                 "eval.every=8", "weight_sync.disk.every=4", "weight_sync.disk.compare=true",
                 "trainer.optimizer.schedule=linear", "trainer.optimizer.warmup_steps=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(runs) -> Launched:
    """One uninterrupted run."""
    job = launch(runs, "whole", *DETERMINISTIC)
    assert job.end() == 0, job.text()
    return job


def test_every_step_is_synced_verified_and_measured(whole):
    rows = whole.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    config = whole.attempt.config()
    parameters = 0.29e6
    for row in rows:
        assert row["weights/version"] == row["step"]
        assert row["staleness/max"] == 0
        assert row["mismatch/abs_max"] < 1e-3
        assert row["sync/bytes"] > 4 * parameters * 0.9
        parts = sum(row[f"time/{part}"] for part in ("rollout", "reward", "logprob", "train", "sync", "other"))
        assert parts == pytest.approx(row["time/step"], rel=1e-6)
        assert row["response/length_max"] <= config.rollout.max_new_tokens
    assert whole.outcome().status == "finished"


def test_the_policy_learns(whole):
    """The reward is 0.02 at first and above 0.4 at the end. The standard error of a step's mean is 0.03 at most: 256
    rewards from 0 to 1."""
    rewards = [row["reward/mean"] for row in whole.rows()]
    assert fmean(rewards[:2]) < 0.1 < 0.3 < fmean(rewards[-4:]), rewards


def test_the_trained_weights_are_a_hugging_face_folder_that_answers_as_the_engine_did(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = whole.attempt.exported(STEPS)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    stop_id = tokenizer.eos_token_id
    for row in evaluation(whole, STEPS):
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt").input_ids
        answer = model.generate(prompt, max_new_tokens=2, do_sample=False, eos_token_id=stop_id, pad_token_id=stop_id)
        assert tokenizer.decode(answer[0, prompt.shape[1]:], skip_special_tokens=True) == row["completion"]


def test_versions_lie_on_disk_as_the_engines_held_them(whole):
    """`compare` has looked into the live engine at each of them; the last is the exported model."""
    root = whole.attempt.weights
    assert sorted(folder.name for folder in root.iterdir()) == [f"step-{STEPS - 4:06d}", f"step-{STEPS:06d}"]
    digests = {folder: recorded_digests(folder) for folder in (*root.iterdir(), whole.attempt.exported(STEPS))}
    assert digests[root / f"step-{STEPS:06d}"] == digests[whole.attempt.exported(STEPS)]
    assert digests[root / f"step-{STEPS - 4:06d}"] != digests[root / f"step-{STEPS:06d}"]
    waited = [row["step"] for row in whole.rows() if "time/disk" in row]
    assert waited == [step + 1 for step in range(4, STEPS, 4)]


def test_every_process_records_the_environment_that_it_has(whole):
    """Read in the process itself: the device's order and what differs between the partitions."""
    plan, config = whole.attempt.plan(), whole.attempt.config()
    recorded = {path.stem: json.loads(path.read_text(encoding="utf-8"))
                for path in (whole.attempt.folder / "environment").iterdir()}
    trainers = {f"trainer-{rank}" for rank in range(plan.training.world_size)}
    assert trainers | {"rollout-0", "driver"} <= set(recorded)
    for name, each in recorded.items():
        role = "trainer" if name in trainers else "rollout" if name.startswith("rollout") else None
        if role:
            expected = envvars.environment(role, "cpu", config, job=whole.attempt.mark)
            shown = {key: value for key, value in expected.items() if key in each["variables"]}
            assert {key: each["variables"][key] for key in shown} == shown and len(shown) > 2
        assert each["node"]


def test_end_says_where_everything_is(whole):
    text = whole.text()
    assert "tensorboard --logdir" in text and "reward/mean" in text
    report = re.search(r"report +(\S+)", text)[1]
    html = open(report, encoding="utf-8").read()
    assert "<svg" in html and "http://" not in html.replace("http://www.w3.org", "")


def test_the_end_shows_the_plan_beside_what_was_measured(whole):
    stored = json.loads((whole.attempt.folder / "plan-vs-measured.json").read_text(encoding="utf-8"))
    rows, forecast = whole.rows()[2:], whole.attempt.plan().forecast
    predicted = {phase.name: phase.seconds for phase in forecast.phases} | {"step": forecast.step_s}
    metrics = {"rollout": ("time/rollout", "time/rollout_hidden"), "reward": ("time/reward",),
               "train": ("time/train",), "sync": ("time/sync",), "step": ("time/step",)}
    assert [phase["name"] for phase in stored["phases"]] == list(metrics)
    for phase in stored["phases"]:
        times = [sum(row[name] for name in metrics[phase["name"]]) for row in rows]
        assert phase["measured"]["median"] == pytest.approx(median(times), rel=1e-12)
        assert phase["predicted"]["seconds"] == predicted[phase["name"]]
    response = next(each for each in stored["lengths"] if each["name"] == "response")
    assert response["measured"] == pytest.approx(fmean(row["response/length_mean"] for row in rows))
    tokens = next(each for each in stored["lengths"] if each["name"] == "step")["measured"]
    assert tokens == pytest.approx(
        256 * fmean(row["response/length_mean"] + row["prompt/length_mean"] for row in rows))
    assert f"measured in it (median of steps 3 to {STEPS})" in whole.text()
    assert "Predicted and measured" in (whole.run_folder / "report.html").read_text(encoding="utf-8")


def test_calibrated_with_the_run_the_plan_of_its_configuration_is_what_it_measured(whole, tmp_path):
    file = tmp_path / "site.yaml"
    shutil.copy("configs/clusters/local-cpu.yaml", file)
    calibrate(whole.run_folder / "attempts" / "1", str(file))
    rows = whole.rows()[2:]
    response = fmean(row["response/length_mean"] for row in rows)
    words = (*DETERMINISTIC, f"cluster={file}", "workload.response.distribution=histogram",
             "workload.response.values=[1, 2]", f"workload.response.counts=[{2 - response}, {response - 1}]")
    phases = {phase.name: phase.seconds for phase in prepare(CONFIG, words, "cpu").plan.forecast.phases
              if phase.name != "reward"}        # which `workload.reward_s` sets
    assert phases == pytest.approx({
        "rollout": median(row["time/rollout"] + row["time/rollout_hidden"] for row in rows),
        "train": median(row["time/train"] for row in rows), "sync": median(row["time/sync"] for row in rows)}, rel=1e-3)


def test_a_family_that_vllm_runs_through_transformers_trains(runs):
    """OLMo-2, whose engine at TP2 has to gather q and k for their norms. `abs_max` compares the engine's log-probs with
    Megatron's after each sync; the live engine is compared with the last version on disk. Nothing but a teacher of
    another family teaches it, and it comes nearer."""
    model = make_tiny(runs / "olmo2-model", "olmo2", tokenizer="characters", vocab_size=64)
    teacher = make_tiny(runs / "teacher", "qwen3", seed=3, tokenizer="characters", vocab_size=64, hidden_size=96,
                        num_hidden_layers=3)
    job = launch(runs, "olmo2", f"model.path={model}", "model.init=load", "run.steps=10", "rollout.tp=2",
                 "weight_sync.disk.every=10", "weight_sync.disk.compare=true", "algorithm.entropy_coef=0",
                 "trainer.optimizer.lr=4e-3",
                 "reward.functions.0.weight=0", "reward.functions.1.weight=0",
                 f"algorithm.distillation.teacher={teacher}")
    assert job.end() == 0, job.text()
    rows = job.rows()
    assert [row["weights/version"] for row in rows] == list(range(1, 11))
    apart = [row["distill/kl"] for row in rows]
    assert fmean(apart[-2:]) < 0.7 * fmean(apart[:2]), apart
    assert all(row["reward/mean"] == 0 and row["train/grad_norm"] > 0 for row in rows)
    assert all(row["mismatch/abs_max"] < 1e-3 for row in rows)
    exported, before = (load_file(folder / "model.safetensors") for folder in (job.attempt.exported(10), model))
    assert exported.keys() == before.keys()
    assert not any(tensor.equal(before[name]) for name, tensor in exported.items()), "every tensor was trained"
