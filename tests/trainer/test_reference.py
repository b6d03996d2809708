"""The frozen models beside the policy, on real ranks against Hugging Face: reference and teacher."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.data.batch import PolicyBatch
from megatron_rl.layouts import step_folder as files
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import hugging_face
from tests.trainer.runs import batches, config_of, logprobs, start


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Another family, width, number of layers (odd: uneven stages) and padding of the vocabulary."""
    return make_tiny(tmp_path_factory.mktemp("teacher"), "qwen3", seed=5, vocab_size=600, hidden_size=96,
                     intermediate_size=128, num_hidden_layers=3, tie_word_embeddings=True)


def _update(trainer, batch: PolicyBatch) -> dict[str, float]:
    trainer.keep_logprobs(batch, "reference")
    trainer.keep_logprobs(batch, "teacher")
    return trainer.update(batch)


def _train(rank: Rank, config, folder):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    probe, *rest = batches(trainer.plan.architecture.vocab, 3)
    before = logprobs(trainer, probe, "reference")
    metrics = [_update(trainer, batch) for batch in rest]
    rows = {"before": before, "after": logprobs(trainer, probe, "reference"), "policy": logprobs(trainer, probe),
            "teacher": logprobs(trainer, probe, "teacher"), "metrics": metrics, "held_by_host": _on_host(trainer)}
    trainer.save(folder, {})
    return rows


def _resumed(rank: Rank, config, folder):
    trainer = start(rank, config)
    trainer.load(folder)
    probe = batches(trainer.plan.architecture.vocab, 1)[0]
    return logprobs(trainer, probe, "reference"), logprobs(trainer, probe), logprobs(trainer, probe, "teacher")


def _on_host(trainer) -> set[bool]:
    return {each._host is not None for each in (trainer._reference, trainer._teacher)}


@pytest.mark.parametrize("offload, sizes", [(False, {"tp": 2}), (True, {"pp": 2})])
def test_frozen_models_keep_their_weights_through_updates_and_a_resume(model, teacher, tmp_path, offload,
                                                                       sizes) -> None:
    """The reference has the initial weights, the teacher those of its own folder."""
    algorithm = {"kl": {"beta": 0.1, "estimator": "k3", "reference_offload": offload},
                 "distillation": {"teacher": str(teacher), "form": "loss", "offload": offload}}
    config = config_of(model, **sizes, algorithm=algorithm)
    folder = files.checkpoint_folder(tmp_path, 2)
    rows = run_ranks(2, _train, config, folder)[0]
    probe = batches(320, 1)[0]
    truth_N, _, _ = hugging_face(model, probe)
    np.testing.assert_allclose(rows["before"], np.where(probe.loss_weights_N != 0, truth_N, 0), atol=2e-4)
    teacher_N, _, _ = hugging_face(teacher, probe)
    np.testing.assert_allclose(rows["teacher"], np.where(probe.loss_weights_N != 0, teacher_N, 0), atol=2e-4)
    assert np.array_equal(rows["after"], rows["before"]) and rows["held_by_host"] == {offload}
    assert np.abs(rows["policy"] - rows["before"]).max() > 1e-3, "the policy itself has moved"
    assert rows["metrics"][0]["train/kl"] == pytest.approx(0, abs=1e-6), "policy and reference start out equal"
    assert rows["metrics"][1]["train/kl"] > 1e-6
    first = batches(320, 2)[1]
    policy_N, teacher_N = (hugging_face(folder, first)[0][first.sampled_N] for folder in (model, teacher))
    assert rows["metrics"][0]["distill/kl"] == pytest.approx((policy_N - teacher_N).mean(), abs=2e-4)
    assert rows["metrics"][0]["distill/teacher_logprob"] == pytest.approx(teacher_N.mean(), abs=2e-4)
    reference_N, policy_N, teacher_N = run_ranks(2, _resumed, config, folder)[0]
    assert np.array_equal(reference_N, rows["before"]), "not the weights of the checkpoint"
    assert np.array_equal(teacher_N, rows["teacher"])
    assert np.array_equal(policy_N, rows["policy"])


def _no_reference(rank: Rank, config):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    with pytest.raises(RuntimeError, match="algorithm.kl.beta is 0"):
        trainer.keep_logprobs(batches(320, 1)[0], "reference")
    with pytest.raises(RuntimeError, match="algorithm.distillation.teacher is null"):
        trainer.keep_logprobs(batches(320, 1)[0], "teacher")
    return trainer._reference is None and trainer._teacher is None


def test_without_a_kl_term_and_a_teacher_no_model_is_built(model) -> None:
    assert run_ranks(1, _no_reference, config_of(model)) == [True]
