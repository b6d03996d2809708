"""On-policy distillation through the whole objective: the exact reverse KL over a vocabulary, float64 loops, and known
answers."""

from __future__ import annotations

import math

import pytest
import torch

from launch.config.schema import Algorithm
from megatron_rl.algorithms.mismatch import means
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.algorithms.sequences import Sequences

POLICY = [-1.0, -2.5, -0.3, -4.0, -0.7, -1.9]
OLD = [-1.2, -2.2, -0.3, -3.6, -0.9, -1.5]
BEHAVIOUR = [-1.1, -2.4, -0.5, -3.7, -0.8, -1.4]
TEACHER = [-0.5, -3.0, -0.3, -9.0, -0.1, -1.0]
ADVANTAGES = [0.3, -0.7, 0.0, 1.1, -0.2, 0.5]
WEIGHTS = [0.25, 0.25, 0.25, 0.25, 0.125, 0.0]


def algorithm(distillation: dict, **changes) -> Algorithm:
    return Algorithm.model_validate({"group_size": 2, "prompts_per_step": 2, "importance_cap": 5.0,
                                     "distillation": {"teacher": "a/folder", **distillation}, **changes})


def objective(config: Algorithm, policy_T: torch.Tensor, teacher_T: torch.Tensor, weights_T: torch.Tensor,
              advantages_T: torch.Tensor, behaviour_T: torch.Tensor, old_T: torch.Tensor | None = None):
    zero_T = torch.zeros(len(policy_T), dtype=torch.int64)
    return token_objective(
        config, logprobs_T=policy_T, entropy_T=None, advantages_T=advantages_T, weights_T=weights_T,
        behaviour_logprobs_T=behaviour_T, old_logprobs_T=old_T, reference_logprobs_T=None, ages_T=zero_T,
        positions_T=zero_T, sequences=Sequences(zero_T, 1), teacher_logprobs_T=teacher_T)


def run(config: Algorithm, **changes):
    """The loss of the tokens above, its gradient, and the metrics."""
    policy_T = torch.tensor(POLICY, requires_grad=True)
    old_T = torch.tensor(OLD) if config.old_logprobs == "recompute" else None
    given = {"teacher_T": torch.tensor(TEACHER), "weights_T": torch.tensor(WEIGHTS),
             "advantages_T": torch.tensor(ADVANTAGES), "behaviour_T": torch.tensor(BEHAVIOUR), "old_T": old_T}
    loss, sums = objective(config, policy_T, **given | changes)
    loss.backward()
    return loss.item(), policy_T.grad, means({name: value.item() for name, value in sums.items()})


MODES = {"on-policy": {}, "bypass": {"updates_per_batch": 2},
         "decoupled": {"old_logprobs": "recompute", "updates_per_batch": 2}}
FORMS = [{"coef": 0.5}, {"form": "loss", "coef": 0.5}, {"form": "loss", "estimator": "k3", "coef": 2.0}]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
def test_value_and_gradient_are_those_of_a_loop_in_float64(mode, form):
    config = algorithm(form, **MODES[mode])
    policy = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in POLICY]
    total = torch.zeros((), dtype=torch.float64)
    for pi, old, mu, teacher, advantage, weight in zip(policy, OLD, BEHAVIOUR, TEACHER, ADVANTAGES, WEIGHTS,
                                                       strict=True):
        before = {"on-policy": pi.item(), "bypass": mu, "decoupled": old}[mode]
        if config.distillation.form == "advantage":
            advantage += config.distillation.coef * (teacher - before)
        ratio = torch.exp(pi - before)
        token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if mode != "bypass":
            token = token * min(math.exp(before - mu), 5.0)
        if config.distillation.form == "loss":
            gap = pi - teacher
            token = token + config.distillation.coef * (
                gap**2 / 2 if config.distillation.estimator == "k2" else torch.exp(-gap) - 1 + gap)
        total = total + weight * token
    total.backward()
    loss, gradient_T, _ = run(config)
    assert loss == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(gradient_T.double(), torch.stack([pi.grad for pi in policy]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", FORMS[:2], ids=["advantage", "loss"])
def test_the_expected_gradient_is_that_of_the_reverse_kl(form):
    """Over a whole vocabulary, every token with its probability, and rewards that teach nothing."""
    logits_V = torch.tensor([0.5, 0.2, -0.3, 0.9, -1.1], dtype=torch.float64, requires_grad=True)
    teacher_V = torch.log_softmax(torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64), 0)
    policy_V = torch.log_softmax(logits_V, 0)
    (0.5 * (policy_V.exp() * (policy_V - teacher_V)).sum()).backward()
    expected_V, logits_V.grad = logits_V.grad.clone(), None
    logprobs_V = torch.log_softmax(logits_V, 0)
    loss, _ = objective(algorithm(form), logprobs_V, teacher_V, logprobs_V.detach().exp(), torch.zeros(5),
                        logprobs_V.detach())
    loss.backward()
    torch.testing.assert_close(logits_V.grad, expected_V, rtol=1e-5, atol=1e-7)


def test_known_advantages():
    """A + coef (log teacher - log pi_old): what the teacher likes more than the policy did gains."""
    _, gradient_T, _ = run(algorithm({"coef": 2.0}, importance_weight="none"))
    known = [1.3, -1.7, 0.0, -8.9, 1.0]
    torch.testing.assert_close(gradient_T[:5], -torch.tensor(WEIGHTS[:5]) * torch.tensor(known))
    _, gradient_T, _ = run(algorithm({"coef": 2.0}, old_logprobs="recompute", importance_weight="none", clip_low=0.9,
                                     clip_high=9.0))
    ratios = [math.exp(0.2), math.exp(-0.3), 1.0, math.exp(-0.4), math.exp(0.2)]
    known = [1.7, -2.3, 0.0, -9.7, 1.4]
    torch.testing.assert_close(gradient_T[:5], -torch.tensor(WEIGHTS[:5]) * torch.tensor(known) * torch.tensor(ratios))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
def test_metrics_are_means_over_the_tokens_in_the_loss_in_every_form(form):
    metrics = run(algorithm(form))[2]
    gaps = [pi - teacher for pi, teacher in zip(POLICY[:5], TEACHER[:5], strict=True)]
    assert metrics["distill/kl"] == pytest.approx(sum(gaps) / 5)
    assert metrics["distill/teacher_logprob"] == pytest.approx(sum(TEACHER[:5]) / 5)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
def test_a_token_outside_the_loss_may_hold_anything(form):
    clean = run(algorithm(form))
    dirty = run(algorithm(form), teacher_T=torch.tensor([*TEACHER[:5], float("nan")]))
    assert dirty[0] == clean[0] and torch.equal(dirty[1], clean[1]) and dirty[2] == clean[2]


@pytest.mark.parametrize("teacher, given", [("a/folder", None), (None, torch.zeros(6))])
def test_a_missing_or_superfluous_tensor_is_refused(teacher, given):
    with pytest.raises(ValueError, match="algorithm.distillation.teacher"):
        run(algorithm({"teacher": teacher}), teacher_T=given)
