from __future__ import annotations

import numpy as np
import pytest

from megatron_rl.data.batch import PolicyBatch
from megatron_rl.layouts import step_folder as files
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import hugging_face
from tests.trainer.runs import batches, config_of, start


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"))


def _with_reference(trainer, batch: PolicyBatch) -> PolicyBatch:
    reference_N = trainer.logprobs(batch, "reference")
    return PolicyBatch(**{**vars(batch), "reference_logprobs_N": reference_N})


def _train(rank: Rank, config, folder):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    probe, *rest = batches(trainer.plan.architecture.vocab, 3)
    before = trainer.logprobs(probe, "reference")
    metrics = [trainer.update(_with_reference(trainer, batch)) for batch in rest]
    rows = {"before": before, "after": trainer.logprobs(probe, "reference"), "policy": trainer.logprobs(probe),
            "metrics": metrics, "held_by_host": _on_host(trainer)}
    trainer.save(folder, {})
    return rows


def _resumed(rank: Rank, config, folder):
    trainer = start(rank, config)
    trainer.load(folder)
    probe = batches(trainer.plan.architecture.vocab, 1)[0]
    return trainer.logprobs(probe, "reference"), trainer.logprobs(probe)


def _on_host(trainer) -> bool:
    return trainer._reference._host is not None


@pytest.mark.parametrize("offload", [False, True])
def test_reference_stays_at_the_initial_weights_through_updates_and_a_resume(model, tmp_path, offload) -> None:
    kl = {"beta": 0.1, "estimator": "k3", "reference_offload": offload}
    config = config_of(model, tp=2, algorithm={"kl": kl})
    folder = files.checkpoint_folder(tmp_path, 2)
    rows = run_ranks(2, _train, config, folder)[0]
    probe = batches(320, 1)[0]
    truth_N, _, _ = hugging_face(model, probe)
    np.testing.assert_allclose(rows["before"], np.where(probe.loss_weights_N != 0, truth_N, 0), atol=2e-4)
    assert np.array_equal(rows["after"], rows["before"]) and rows["held_by_host"] is offload
    assert np.abs(rows["policy"] - rows["before"]).max() > 1e-3, "the policy itself has moved"
    assert rows["metrics"][0]["train/kl"] == pytest.approx(0, abs=1e-6), "policy and reference start out equal"
    assert rows["metrics"][1]["train/kl"] > 1e-6
    reference_N, policy_N = run_ranks(2, _resumed, config, folder)[0]
    assert np.array_equal(reference_N, rows["before"]), "not the weights of the checkpoint"
    assert np.array_equal(policy_N, rows["policy"])


def _no_reference(rank: Rank, config):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    with pytest.raises(RuntimeError, match="algorithm.kl.beta is 0"):
        trainer.logprobs(batches(320, 1)[0], "reference")
    return trainer._reference is None


def test_without_a_kl_term_no_reference_is_built(model) -> None:
    assert run_ranks(1, _no_reference, config_of(model)) == [True]
