"""The bodies of the tests for a GPU, on the CPU: what nobody can run here must not go stale."""

from __future__ import annotations

import pytest

from tests.gpu.one_gpu import on_gpu
from tests.gpu.test_rollout import assert_serves_the_weights_of_a_trainer
from tests.gpu.test_training import LENGTHS, VOCAB, _one_update, assert_is_hugging_faces
from tests.tiny_models import make_tiny
from tests.trainer.harness import make_batch
from tests.trainer.runs import config_of


@pytest.mark.slow
def test_an_engine_serves_what_a_trainer_packed(tmp_path):
    assert_serves_the_weights_of_a_trainer(tmp_path, "cpu")


def test_one_step_equals_hugging_face(tmp_path):
    folder = make_tiny(tmp_path, "llama", tie_word_embeddings=False)
    batch = make_batch(LENGTHS, VOCAB)
    assert_is_hugging_faces(on_gpu(_one_update, config_of(folder, dtype="bf16", token_budget=64), batch, "cpu"), folder,
                            batch)
