"""The careful recipe as a whole job: two training replicas, an engine one version behind, old log-probs recomputed, a
KL term, two mini-batches twice, T = 0.8. Its weights are those of a reference in float64 that knows only the rollouts
(tests/job/float64_reference.py). So what lies between a rollout and the weights cannot be wrong: rewards and their
groups, advantages, temperature, which weights give which log-probs, the order of updates, schedule, clipping, Adam."""

from __future__ import annotations

import copy
import json
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.job.float64_reference import Recipe, Reference
from tests.job.graders import letters
from tests.job.runner import Launched, launch
from tests.tiny_models import make_tiny

STEPS, MINI_BATCHES, EPOCHS, GROUPS, SAMPLES = 3, 2, 2, 8, 16
UPDATES = STEPS * MINI_BATCHES * EPOCHS
RATE, LAST_RATE, WARMUP = 1.5e-3, 5e-4, 2
RECIPE = Recipe(
    temperature=0.8, mini_batches=MINI_BATCHES, epochs=EPOCHS, cap=1.5, clip_low=0.2, clip_high=0.28, beta=0.1,
    entropy_coef=0.03,
    rate=lambda update: RATE * (update + 1) / WARMUP if update < WARMUP else
    RATE - (RATE - LAST_RATE) * (update - WARMUP) / (UPDATES - 1 - WARMUP),
    # Where eps is small Adam divides rounding by rounding, and the comparison would say nothing.
    betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1, clip_grad=0.5)
WORDS = (
    f"run.steps={STEPS}", "model.init=load", "trainer.tp=1", "trainer.pp=1", "trainer.dp=2", "trainer.token_budget=128",
    f"trainer.optimizer={{lr: {RATE}, min_lr: {LAST_RATE}, schedule: linear, warmup_steps: {WARMUP}, beta1: 0.9, "
    "beta2: 0.95, eps: 1.0e-3, weight_decay: 0.1, clip_grad: 0.5}",
    "rollout.temperature=0.8", "rollout.max_new_tokens=6", "rollout.swap=border", "rollout.deterministic=true",
    f"algorithm.prompts_per_step={GROUPS}", f"algorithm.group_size={SAMPLES}",
    f"algorithm.updates_per_batch={MINI_BATCHES}", f"algorithm.epochs={EPOCHS}", "algorithm.max_staleness=1",
    "algorithm.old_logprobs=recompute", "algorithm.importance_cap=1.5",
    "algorithm.kl={beta: 0.1, estimator: k3}", "algorithm.entropy_coef=0.03",
    "reward.functions=[{function: 'tests.job.graders:letters'}]",
    "eval.at_end=false", "checkpoint.every=0", "monitor.rollouts_every=1")
LOGPROB, WEIGHT = 1e-4, 2e-6
"""How far float32 may be from float64: a log-prob of an engine, and a weight at the end. Weights of about 1 are rounded
by 6e-8 in each update, and a gradient that is off by 1e-5 of itself moves a weight by 1e-5 of its way (some 1e-2)."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), tokenizer="characters", vocab_size=64)


@pytest.fixture
def one_thread():
    """Tensors this small are not worth a second one, for which a busy machine lets the first wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def job(tmp_path_factory, model) -> Launched:
    job = launch(tmp_path_factory.mktemp("runs"), "careful", f"model.path={model}", *WORDS)
    assert job.end() == 0, job.text()
    return job


def test_a_whole_job_ends_with_the_weights_of_a_float64_reference(job, model, one_thread):
    reference, tokenizer = Reference(model, RECIPE), AutoTokenizer.from_pretrained(model)
    initial, versions = reference.weights(), [copy.deepcopy(reference)]
    assert [row["step"] for row in job.rows()] == list(range(1, STEPS + 1))
    for step, row in enumerate(job.rows(), 1):
        batch, version = rollouts(job, step), max(0, step - 2)
        assert [(each["group"], each["sample"]) for each in batch] == [
            (group, sample) for group in range(GROUPS) for sample in range(SAMPLES)]
        assert {token for each in batch for token in each["weight_versions"]} == {version}
        sampled_N = torch.tensor([value for each in batch for value in each["logprobs"]], dtype=torch.float64)
        assert (sampled_N - versions[version].logprobs(batch)).abs().max() < LOGPROB, \
            "the engine sampled with other weights, or at another temperature"
        rewards = [_reward(each, tokenizer) for each in batch]
        assert [each["reward"] for each in batch] == rewards and row["reward/mean"] == pytest.approx(fmean(rewards))

        updates = reference.step(batch, rewards)
        assert all(update["grad_norm"] > 2 * RECIPE.clip_grad for update in updates), "nothing is clipped"
        for name, ours in {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/kl": "kl"}.items():
            assert row[name] == pytest.approx(fmean(update[ours] for update in updates), rel=1e-4, abs=1e-6), name
        versions.append(copy.deepcopy(reference))
    assert row["correction/capped"] > 0.05 and row["train/clip_fraction"] > 0.005, "the recipe corrects nothing"

    found = load_file(job.attempt.exported(STEPS) / "model.safetensors")
    moved, apart = _farthest(initial, reference.weights()), _farthest(found, reference.weights())
    assert apart < WEIGHT < 1e-3 * moved, (apart, moved)


def rollouts(job: Launched, step: int) -> list[dict]:
    path = job.attempt.folder / "rollouts" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _reward(rollout: dict, tokenizer) -> float:
    """From the tokens, as if nobody had scored them."""
    prompt, completion = (tokenizer.decode(rollout[name], skip_special_tokens=True)
                          for name in ("prompt_token_ids", "token_ids"))
    left, right = (int(digit) for digit in prompt.removesuffix("=").split())
    return letters(completion, str(max(left, right)), prompt=prompt)


def _farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((found[name].double() - weights).abs().max().item() for name, weights in expected.items())
