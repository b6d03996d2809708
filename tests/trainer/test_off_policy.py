"""Losses and corrections through the trainer's step: the gradient equals that of plain loops over whole sequences, also
where packing puts several into a micro-batch and context parallelism splits each over two ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.config.resolved import ResolvedConfig
from launch.config.schema import Algorithm
from megatron_rl.algorithms.mismatch import means
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.trainer import step
from tests.algorithms.plain_loops import Loss, Token, policy_loss
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import TrainingRank, assert_gradients_equal, make_groups, make_plan, of_rank, run_config

VOCAB = 320
GROUPS = [(12, [5, 9, 1, 14]), (1, [3, 1, 6, 2]), (7, [20, 17, 33, 8])]
CASES = {
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "old_logprobs": "recompute", "clip_low": 0.05},
    "cispo, sequence weight": {"loss": "cispo", "importance_weight": "sequence", "old_logprobs": "recompute"},
    "sequence mask on-policy": {"rejection": {"rule": "sequence", "low": 0.8, "high": 1.25}},
    "geometric mask": {"old_logprobs": "recompute", "rejection": {"rule": "geometric", "low": 0.95, "high": 1.05}},
    "off-policy mask in bypass": {"epochs": 2, "rejection": {"rule": "off_policy", "high": 0.005}},
    "interpolated, icepop": {"old_logprobs": "interpolate", "clip_low": 0.05, "clip_high": 0.05,
                             "rejection": {"rule": "icepop", "low": 0.9, "high": 1.1}},
}


def algorithm(case: str) -> Algorithm:
    return Algorithm.model_validate({"group_size": 4, "prompts_per_step": 3, **CASES[case]})


class Truth:
    """Hugging Face's log-probs, each sequence on its own, and their gradient by any slopes."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.get_input_embeddings().padding_idx = None
        batch = make_groups(GROUPS, VOCAB, tools=0.2)
        self.logprobs = []
        for start, stop in itertools.pairwise(batch.offsets_B1):
            ids = torch.from_numpy(batch.tokens_N[start:stop].astype(np.int64))
            log_p = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
            self.logprobs.append(log_p.gather(1, ids[1:, None]).squeeze(1))
        current_N = np.concatenate([[0, *each.detach().numpy()] for each in self.logprobs]).astype(np.float32)
        rng = np.random.default_rng(0)
        n = len(current_N)
        self.batch = replace(batch, behaviour_logprobs_N=current_N + rng.normal(0, 0.15, n).astype(np.float32),
                             ages_N=rng.integers(0, 6, n, dtype=np.int32))
        self.old_N = current_N + np.random.default_rng(1).normal(0, 0.1, n).astype(np.float32)
        self.current_N = current_N

    def of(self, config: Algorithm, sign: int = 1) -> tuple[Loss, dict[str, np.ndarray]]:
        """`sign` -1 turns the log-ratios to the current policy around."""
        batch, places = self.batch, []
        behaviour_N, old_N = (self.current_N + sign * (values_N - self.current_N)
                              for values_N in (batch.behaviour_logprobs_N, self.old_N))
        for start, stop in itertools.pairwise(batch.offsets_B1):
            places.append([j for j in range(start, stop) if batch.loss_weights_N[j] != 0])
        loss = policy_loss(config, [
            [Token(*(float(values_N[j]) for values_N in (
                self.current_N, behaviour_N, batch.advantages_N, batch.loss_weights_N, old_N)),
                age=int(batch.ages_N[j])) for j in sequence] for sequence in places])
        slopes_N = np.zeros(len(self.current_N), np.float32)
        for sequence, slopes in zip(places, loss.slopes, strict=True):
            slopes_N[sequence] = slopes
        total = sum((torch.from_numpy(slopes_N[start + 1:stop]) * chosen).sum()
                    for (start, stop), chosen in zip(itertools.pairwise(batch.offsets_B1), self.logprobs, strict=True))
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        return loss, {name: gradient.numpy() for name, gradient in zip(names, gradients, strict=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth(folder)


def _steps(rank: Rank, config: ResolvedConfig, batch: PolicyBatch, old_N: np.ndarray) -> dict[str, tuple]:
    training, results = TrainingRank(rank, config), {}
    for case in CASES:
        chosen = algorithm(case)
        fixed = {"old_logprobs_T": of_rank(old_N, training.plan, batch)} if chosen.old_logprobs == "recompute" else {}
        training.zero_grad()
        sums = step.run_step(training.chunks, training.plan, batch, partial(token_objective, chosen), 1.0, fixed=fixed)
        results[case] = sums, training.gradients()
    return results


@pytest.mark.parametrize("trainer", [
    {"token_budget": 1000}, {"cp": 2, "token_budget": 64}, {"tp": 2, "cp": 2, "sequence_parallel": True},
], ids=["packed", "cp2", "tp2-sp-cp2"])
def test_gradient_equals_that_of_plain_loops(trainer: dict, folder: Path, truth: Truth) -> None:
    config = run_config(folder, **trainer)
    results = run_ranks(make_plan(config).training.world_size, _steps, config, truth.batch, truth.old_N)
    for case in CASES:
        loss, expected = truth.of(algorithm(case))
        sums, gradients = results[0][case]
        assert_gradients_equal(gradients, expected)
        assert sums["train/loss"] == pytest.approx(loss.value, rel=1e-4, abs=1e-6), case
        assert all(rank[case][0] == sums for rank in results), "every rank reports the same numbers"
        _check_told(case, means(sums), loss, truth.batch)


def _check_told(case: str, metrics: dict[str, float], loss: Loss, batch: PolicyBatch) -> None:
    kept = [keep for sequence in loss.kept for keep in sequence]
    if "rejection" in CASES[case]:
        assert 0.1 < metrics["correction/rejected"] < 0.9, "the case decides nothing"
        assert metrics["correction/rejected"] == pytest.approx(1 - np.mean(kept)), case
    if "correction/rejected_sequences" in metrics and "bypass" not in case:     # there advantages differ by token
        assert metrics["correction/rejected_sequences"] == pytest.approx(
            np.mean([not keeps[0] for keeps in loss.kept if keeps]), rel=1e-5), case
    if "correction/ess" in metrics:
        weights = np.array([weight for sequence in loss.weights for weight in sequence])
        ages = batch.ages_N[batch.loss_weights_N != 0]
        for name, w in {"": weights, "/age_0": weights[ages == 0], "/age_4_up": weights[ages >= 4]}.items():
            assert metrics[f"correction/ess{name}"] == pytest.approx(w.sum()**2 / (len(w) * (w**2).sum()), rel=1e-4)


def test_the_truth_depends_on_every_sign(truth: Truth) -> None:
    """The comparison is worth something: log-ratios with the other sign give another gradient."""
    for case in CASES:
        with pytest.raises(AssertionError, match="is off by"):
            assert_gradients_equal(truth.of(algorithm(case), -1)[1], truth.of(algorithm(case))[1])
