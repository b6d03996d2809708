"""Trajectories with what tools wrote in them: they train as Hugging Face trains with those labels masked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.config.schema import Algorithm, RunConfig
from megatron_rl.algorithms.batch import build_policy_batches
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.data.batch import Group, PolicyBatch, Prompt, Trajectory
from megatron_rl.trainer import step
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import TrainingRank, assert_gradients_equal, make_plan, run_config

VOCAB = 320
SHAPES = [(12, ["ss", "sttts", "sssttsstss"]), (1, ["tss", "ssst", "s"]), (20, ["ttstts", "sstt"])]
"""Tokens of a prompt; for each of its trajectories, which tokens were sampled (s) and which a tool wrote (t)."""
ALGORITHM = Algorithm.model_validate({"group_size": 3, "prompts_per_step": 3, "advantage": "grpo_no_std",
                                      "importance_cap": None})


def _groups() -> list[Group]:
    rng = np.random.default_rng(5)
    groups = []
    for index, (prompt, shapes) in enumerate(SHAPES):
        trajectories = []
        for shape in shapes:
            sampled = np.array([letter == "s" for letter in shape])
            trajectories.append(Trajectory(
                rng.integers(0, VOCAB, len(shape), dtype=np.int32), sampled,
                np.where(sampled, -rng.uniform(4, 7, len(shape)), np.nan).astype(np.float32),
                np.where(sampled, 0, 999).astype(np.int32), "stop"))
        groups.append(Group(Prompt(index, rng.integers(0, VOCAB, prompt, dtype=np.int32), "", None, {}),
                            tuple(trajectories)))
    return groups


GROUPS = _groups()
REWARDS = [np.array([1.0, 0.0, 0.5]), np.array([0.0, 1.0, 1.0]), np.array([0.0, 1.0])]


def _flipped(group: Group) -> Group:
    return replace(group, trajectories=tuple(
        replace(each, sampled=~each.sampled, logprobs=np.zeros_like(each.logprobs),
                weight_versions=np.zeros_like(each.weight_versions)) for each in group.trajectories))


def _update(rank: Rank, config: RunConfig, batch: PolicyBatch) -> tuple:
    training = TrainingRank(rank, config)
    logprobs_N = training.logprobs(batch)
    training.zero_grad()
    sums = step.run_step(training.chunks, training.plan, batch, partial(token_objective, ALGORITHM), 1.0)
    return logprobs_N, sums, training.gradients(batch.normaliser)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probs of the sampled tokens in order, and the gradient of the token mean of -A log p: by Hugging Face's own
    loss, with the label -100 on prompts and on what tools wrote."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None     # it would withhold the gradient of a sampled pad token
    count = sum(shape.count("s") for _, shapes in SHAPES for shape in shapes)
    logprobs = []
    for group, rewards_G in zip(GROUPS, REWARDS, strict=True):
        for trajectory, reward in zip(group.trajectories, rewards_G, strict=True):
            ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, trajectory.token_ids]).astype(np.int64))
            labels = ids.clone()
            labels[:len(group.prompt.token_ids)] = -100
            labels[len(group.prompt.token_ids):][torch.from_numpy(~trajectory.sampled)] = -100
            answer = model(ids[None], labels=labels[None])
            advantage = reward - rewards_G.mean()
            (advantage * answer.loss * (labels != -100).sum() / count).backward()
            log_p = answer.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            logprobs.append(log_p[labels[1:] != -100].detach().numpy())
    return np.concatenate(logprobs), {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("trainer", [
    {"token_budget": 1000}, {"tp": 2, "pp": 2, "token_budget": 48}, {"tp": 2, "sequence_parallel": True}, {"cp": 2},
], ids=["shared-prompts", "shared-tp2-pp2", "tp2-sp", "cp2"])
def test_tool_tokens_are_context_without_loss_or_metric(trainer: dict, folder: Path, truth: tuple) -> None:
    config = run_config(folder, **trainer)
    (batch,) = build_policy_batches(GROUPS, REWARDS, ALGORITHM, 64, version=0)
    # What stands there must not matter to anybody: not even a weight would make a tool's token count.
    batch = replace(batch, loss_weights_N=np.where(batch.sampled_N, batch.loss_weights_N, 7.0).astype(np.float32),
                    behaviour_logprobs_N=np.where(batch.sampled_N, batch.behaviour_logprobs_N, -3.0).astype(np.float32))
    logprobs_N, sums, gradients = run_ranks(make_plan(config).training.world_size, _update, config, batch)[0]
    logprobs_T, expected = truth
    np.testing.assert_allclose(logprobs_N[batch.sampled_N], logprobs_T, atol=5e-5)
    assert not logprobs_N[~batch.sampled_N].any()
    assert_gradients_equal(gradients, expected)
    log_ratio_T = logprobs_T.astype(np.float64) - batch.behaviour_logprobs_N[batch.sampled_N]
    assert sums["train/tokens"] == len(logprobs_T)
    assert sums["train/ratio_mean"] == len(logprobs_T), "on the first update every ratio is 1"
    assert sums["mismatch/kl"] == pytest.approx((np.expm1(log_ratio_T) - log_ratio_T).sum(), rel=1e-3)
    assert sums["mismatch/abs_mean"] == pytest.approx(np.abs(log_ratio_T).sum(), rel=1e-3)
    assert sums["mismatch/abs_max"] == pytest.approx(np.abs(log_ratio_T).max(), rel=1e-3)


def test_with_the_mask_flipped_the_gradient_is_another(folder: Path, truth: tuple) -> None:
    config = run_config(folder, token_budget=1000)
    (batch,) = build_policy_batches([_flipped(group) for group in GROUPS], REWARDS, ALGORITHM, 64, version=0)
    _, _, gradients = run_ranks(1, _update, config, batch)[0]
    with pytest.raises(AssertionError, match="is off by"):
        assert_gradients_equal(gradients, truth[1])
