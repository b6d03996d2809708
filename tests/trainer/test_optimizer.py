from __future__ import annotations

import math

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_rl.trainer.optimizer import LearningRate, learning_rate
from megatron_rl.trainer.trainer import MegatronTrainer
from tests.ranks import Rank, RankError, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import make_plan
from tests.trainer.runs import (
    assert_same_bits,
    batches,
    config_of,
    poison_next_gradient,
    start,
    whole_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"))


def test_warm_up_rises_to_the_peak_and_never_wastes_a_step() -> None:
    schedule = LearningRate("constant", peak=8.0, final=0.0, warmup=4, total=100)
    assert [schedule.at(step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_decay_ends_at_the_final_rate() -> None:
    schedule = LearningRate("linear", peak=10.0, final=2.0, warmup=2, total=7)
    assert [schedule.at(step) for step in range(7)] == pytest.approx([5.0, 10.0, 10.0, 8.0, 6.0, 4.0, 2.0])
    assert schedule.at(50) == 2.0, "a run that is made longer stays at the final rate"


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    schedule = LearningRate("cosine", peak=1.0, final=0.2, warmup=0, total=9)
    assert schedule.at(0) == 1.0
    assert schedule.at(4) == pytest.approx(0.6)
    assert schedule.at(2) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.at(8) == pytest.approx(0.2)


def test_schedule_is_counted_in_optimizer_steps_not_in_rollouts(model) -> None:
    config = config_of(model, run={"steps": 5}, algorithm={"updates_per_batch": 2, "prompts_per_step": 2})
    assert learning_rate(config).total == 10


def _held_still(rank: Rank, configs: list):
    """The whole model after an update that is too small to change anything, with each configuration."""
    weights = []
    for config in configs:
        trainer = MegatronTrainer(config, make_plan(config), rank.rank) if weights else start(rank, config)
        trainer.load_initial_weights()
        assert trainer.update(batches(trainer.plan.architecture.vocab, 1)[0])["train/skipped"] == 0
        weights.append(whole_model(trainer))
    return weights


def test_the_first_update_starts_from_the_loaded_weights(model) -> None:
    """In bf16 the optimizer has fp32 copies of the weights, made before the folder was loaded; the first update writes
    them over the model's."""
    configs = [config_of(model, dtype="bf16", distributed_optimizer=distributed,
                         optimizer={"lr": 1e-30, "schedule": "constant", "warmup_steps": 0})
               for distributed in (True, False)]
    loaded = {name: weights.bfloat16().float().numpy()
              for name, weights in load_file(model / "model.safetensors").items()}
    for found in run_ranks(1, _held_still, configs)[0]:
        assert_same_bits(found, loaded)


def _poisoned(rank: Rank, config, poison: list[float]):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    rows = []
    for value, batch in zip(poison, batches(trainer.plan.architecture.vocab, len(poison)), strict=True):
        if value:
            poison_next_gradient(trainer, value)
        before = whole_model(trainer)
        metrics = trainer.update(batch)
        after = whole_model(trainer)
        rows.append((metrics, before, after, trainer.optimizer.updates))
    return rows


def test_gradient_that_is_not_finite_skips_the_update_on_every_rank(model) -> None:
    """One rank overflows; the schedule and Adam's count do not move either."""
    config = config_of(model, tp=2, dp=2)
    ranks = run_ranks(4, _poisoned, config, [0.0, math.nan, math.inf, 0.0])
    assert [[row[0]["train/skipped"] for row in rank] for rank in ranks] == [[0.0, 1.0, 1.0, 0.0]] * 4
    assert [row[3] for row in ranks[0]] == [1, 1, 1, 2]
    assert [row[0]["train/lr"] for row in ranks[0]] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])
    for _, before, after, _ in ranks[0][1:3]:
        assert_same_bits(after, before)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(ranks[0][3][1][name], ranks[0][3][2][name])
    assert all(np.isfinite(values).all() for values in ranks[0][3][2].values())


def test_third_such_gradient_in_a_row_ends_the_run_with_a_message(model) -> None:
    with pytest.raises(RankError, match=r"not finite 3 updates in a row.*(.|\n)*lower learning rate"):
        run_ranks(1, _poisoned, config_of(model), [0.0, math.nan, math.nan, math.nan])
