from __future__ import annotations

import itertools
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.data.batch import PolicyBatch
from megatron_rl.driver import step_metrics
from megatron_rl.driver.actors import TrainerActor
from megatron_rl.layouts.tiles import CanonicalTensor
from megatron_rl.monitor.metrics import lookup
from megatron_rl.trainer.initial_weights import draw_canonical
from megatron_rl.trainer.trainer import MegatronTrainer
from tests.ranks import Rank, run_ranks
from tests.tiny_models import make_tiny
from tests.trainer.harness import make_batch, make_plan
from tests.trainer.runs import (
    LENGTHS,
    assert_same_bits,
    batches,
    config_of,
    logprobs,
    start,
    whole_model,
    worst_difference,
)

UPDATES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


def _train(rank: Rank, config, updates: int):
    trainer = start(rank, config)
    trainer.load_initial_weights()
    before = whole_model(trainer)
    vocab = trainer.plan.architecture.vocab
    metrics = [trainer.update(batch) for batch in batches(vocab, updates)]
    return before, metrics, whole_model(trainer)


PARTS = ((slice(0, 2), 10.0), (slice(2, 3), 7.0), (slice(3, 6), 20.0))
"""Sequences and normaliser of the parts of a batch."""


def _part(batch: PolicyBatch, sequences: slice, normaliser: float) -> PolicyBatch:
    """Some sequences of a batch, with weights that lack the normaliser of all parts together."""
    bounds, total = batch.offsets_B1, sum(each for _, each in PARTS)
    tokens = slice(bounds[sequences.start], bounds[sequences.stop])
    cut = {field.name: getattr(batch, field.name)[tokens] for field in fields(batch)
           if field.name.endswith("_N") and getattr(batch, field.name) is not None}
    return replace(batch, **cut | {"loss_weights_N": cut["loss_weights_N"] * np.float32(total)},
                   lengths_B=batch.lengths_B[sequences], prompt_lengths_B=batch.prompt_lengths_B[sequences],
                   normaliser=normaliser)


def _train_in_parts(rank: Rank, config, updates: int):
    """What `_train` returns, then metrics and weights of the same batches in parts, twice. The last step of the second
    time has its last part before it. Log-prob passes lie between the parts."""
    whole, again = _train(rank, config, updates), []
    for last in (True, False):
        trainer = MegatronTrainer(config, make_plan(config), rank.rank)
        trainer.load_initial_weights()
        metrics = []
        for batch in batches(trainer.plan.architecture.vocab, updates):
            parts = [_part(batch, *each) for each in PARTS]
            for part in parts[:-1] if last else parts:
                trainer.accumulate(part)
                trainer.logprobs(part)
            metrics.append(trainer.update(parts[-1] if last else None))
        again.append((metrics, whole_model(trainer)))
    return whole, again


def _hugging_face_grpo(folder, section):
    """The same updates by Hugging Face's model, torch's AdamW and autograd: every sequence on its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": section.weight_decay},
                              {"params": vectors, "weight_decay": 0.0}], betas=(section.beta1, section.beta2),
                             eps=section.eps)
    rows = []
    for step, batch in enumerate(batches(model.config.vocab_size, UPDATES)):
        rate = section.lr * (step + 1) / 2 if step < 2 else section.lr * (1 - (step - 2) / (10 - 1 - 2))
        for group in adam.param_groups:
            group["lr"] = rate
        adam.zero_grad()
        total, entropy, tokens = 0.0, 0.0, 0
        for start_, stop in itertools.pairwise(batch.offsets_B1):
            ids = torch.from_numpy(batch.tokens_N[start_:stop].astype(np.int64))
            log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
            chosen = log_p.gather(1, ids[1:, None]).squeeze(1)
            weights, advantages = (torch.from_numpy(x[start_ + 1:stop])
                                   for x in (batch.loss_weights_N, batch.advantages_N))
            # on-policy: the ratio is 1 and its gradient is that of the log-prob
            loss = -(weights * advantages * torch.exp(chosen - chosen.detach())).sum()
            loss.backward()
            total += loss.item()
            entropy += -(log_p.detach().exp() * log_p.detach()).sum(-1)[weights != 0].sum().item()
            tokens += int((weights != 0).sum())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_grad)
        adam.step()
        rows.append({"train/loss": total, "train/grad_norm": float(norm), "train/lr": rate,
                     "train/entropy": entropy / tokens, "train/tokens": tokens})
    return rows, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [
    pytest.param({"tp": 2, "dp": 2}, id="tp2-dp2-distributed-optimizer"),
    pytest.param({"pp": 2, "vpp": 2, "cp": 2, "distributed_optimizer": False}, id="pp2-vpp2-cp2-plain-optimizer"),
])
def test_updates_equal_hugging_face_and_adamw(model, sizes) -> None:
    """The folder's weights first; loss, entropy, gradient norm, schedule, clipping, weight decay and weights after
    three updates. Trained in parts, the same up to rounding, and every time the same bits."""
    # Where eps is small Adam divides rounding by rounding and the comparison would say nothing.
    config = config_of(model, token_budget=32, optimizer={"eps": 1e-3}, **sizes)
    results, in_parts = zip(*run_ranks(4, _train_in_parts, config, UPDATES), strict=True)
    expected_metrics, expected = _hugging_face_grpo(model, config.trainer.optimizer)
    assert all(metrics == results[0][1] for _, metrics, _ in results), "every rank reports the same numbers"
    for found, truth in zip(results[0][1], expected_metrics, strict=True):
        for name, value in truth.items():
            assert found[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    before, _, weights = results[0]
    assert_same_bits(before, {name: p.detach().numpy() for name, p in AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32).named_parameters()})
    assert worst_difference(weights, expected) < 2e-5

    (metrics, found), (same_metrics, same) = in_parts[0]
    assert all(each[0][0] == metrics for each in in_parts), "every rank reports the same numbers"
    assert metrics == same_metrics
    assert_same_bits(same, found)
    assert worst_difference(found, weights) < 1e-6
    for row, plain in zip(metrics, results[0][1], strict=True):
        assert row.keys() == plain.keys() and row.pop("train/microbatches") >= len(PARTS)
        assert row == pytest.approx({name: plain[name] for name in row}, rel=1e-4, abs=1e-6)


def test_metrics_are_those_of_the_table(model) -> None:
    _, (metrics,), _ = run_ranks(1, _train, config_of(model), 1)[0]
    assert not [name for name in metrics if lookup(name) is None]
    assert metrics["train/ratio_mean"] == pytest.approx(1.0) and metrics["train/clip_fraction"] == 0
    assert metrics["train/skipped"] == 0 and metrics["train/sequences"] == 6


def _two_updates(rank: Rank, config) -> list[dict[str, float]]:
    """Two mini-batches of one rollout batch; the engine's log-probs are the trainer's own before the first."""
    trainer = start(rank, config)
    trainer.load_initial_weights()
    metrics = []
    twice = batches(trainer.plan.architecture.vocab, 2)
    twice = [replace(batch, behaviour_logprobs_N=logprobs(trainer, batch), number=number)
             for number, batch in enumerate(twice)]
    if config.algorithm.old_logprobs == "recompute":
        for batch in twice:
            trainer.keep_logprobs(batch, "policy")
    for index, batch in enumerate(twice):
        metrics.append(trainer.update(batch, index, more=index == 0))
    return metrics


@pytest.mark.parametrize("old_logprobs, sizes", [
    ("none", {}), ("recompute", {"dp": 2, "cp": 2}), ("recompute", {"pp": 2, "vpp": 2}),
    ("recompute", {"tp": 2, "sequence_parallel": True}),
], ids=["bypass", "dp2-cp2", "pp2-vpp2", "tp2-sp"])
def test_drift_of_the_policy_is_not_shown_as_mismatch(model, old_logprobs, sizes) -> None:
    """An engine without any error: on the second update the policy has moved, the mismatch stays 0 or is left out. So
    each rank's old log-probs are those of the tokens that it trains."""
    config = config_of(model, token_budget=24, algorithm={"updates_per_batch": 2, "old_logprobs": old_logprobs},
                       **sizes)
    first, second = run_ranks(make_plan(config).training.world_size, _two_updates, config)[0]
    assert first["mismatch/abs_max"] < 1e-5
    assert min(first["train/microbatches"], second["train/microbatches"]) > 1
    assert abs(second["train/ratio_max"] - 1) > 0.1, "the policy did move"
    if old_logprobs == "recompute":
        assert second["mismatch/abs_max"] == 0.0
    else:
        assert not [name for name in second if name.startswith(("mismatch/", "drift/"))]
    merged = step_metrics._updates([first, second])
    assert merged["mismatch/kl"] < 1e-9 and merged["mismatch/abs_max"] < 1e-5


def _answers(rank: Rank, config, lengths: list[int]) -> dict[str, int]:
    """Bytes of what the verbs of an actor answer to the driver, in a step of two batches of this size."""
    actor = object.__new__(TrainerActor)        # without the files of an attempt
    actor.name, actor.trainer = f"trainer-{rank.rank}", start(rank, config)
    actor.load_initial_weights()
    first, second = (replace(make_batch(lengths, actor.trainer.plan.architecture.vocab, seed), number=seed)
                     for seed in range(2))
    answers = {f"{model} {each.number}": actor.keep_logprobs(each, model) for each in (first, second)
               for model in ("policy", "reference", "teacher")}
    answers |= {"accumulate": actor.accumulate(first), "update": actor.update(1, second, 0, False)}
    assert actor.trainer._fixed._batches == {}, "a step keeps nothing for the next"
    return {name: len(pickle.dumps(answer)) for name, answer in answers.items()}


def test_what_the_ranks_answer_does_not_grow_with_the_batch(model) -> None:
    """The careful recipe: old, reference and teacher log-probs stay where they are."""
    config = config_of(model, dp=2, token_budget=400, algorithm={
        "old_logprobs": "recompute", "kl": {"beta": 0.1}, "distillation": {"teacher": str(model)}})
    few, many = (run_ranks(2, _answers, config, LENGTHS * times) for times in (1, 16))
    assert few == many, "bytes"
    for answers in many:
        assert max(bytes_ for name, bytes_ in answers.items() if name != "update") < 10, "None"
        assert answers["update"] < 8192, "some hundred numbers with names"


def test_random_weights_do_not_depend_on_the_layout(tmp_path) -> None:
    folder = make_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    drawn = {"init": "random"}
    weights = [run_ranks(world, _train, config_of(folder, model=drawn, **sizes), 0)[0][0]
               for world, sizes in ((1, {}), (4, {"tp": 2, "pp": 2}))]
    assert_same_bits(weights[1], weights[0])
    other = run_ranks(1, _train, config_of(folder, model=drawn, run={"seed": 1}), 0)[0][0]
    assert not np.array_equal(other["model.embed_tokens.weight"], weights[0]["model.embed_tokens.weight"])


def test_random_weights_follow_hugging_faces_rule() -> None:
    """normal(0, initializer_range), norms 1, biases 0; no two tensors alike."""
    matrix = draw_canonical(CanonicalTensor("model.layers.0.mlp.up_proj.weight", (400, 300)), 0, 0.05)
    assert abs(matrix.mean()) < 5e-4 and matrix.std() == pytest.approx(0.05, rel=0.01)
    gate = draw_canonical(CanonicalTensor("model.layers.0.mlp.gate_proj.weight", (400, 300)), 0, 0.05)
    assert abs(torch.corrcoef(torch.stack([matrix.flatten(), gate.flatten()]))[0, 1]) < 0.02
    attention = "model.layers.0.self_attn."
    assert draw_canonical(CanonicalTensor(attention + "q_norm.weight", (8,)), 0, 0.05).tolist() == [1.0] * 8
    assert draw_canonical(CanonicalTensor(attention + "q_proj.bias", (8,)), 0, 0.05).tolist() == [0.0] * 8
