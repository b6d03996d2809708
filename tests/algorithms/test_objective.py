"""The objective in its three modes against a float64 formula written out by hand, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from launch.config.schema import Algorithm
from megatron_rl.algorithms.objective import token_objective
from megatron_rl.algorithms.sequences import Sequences

T = 64
ONE = Sequences(torch.zeros(T, dtype=torch.int64), 1)


def algorithm(**changes) -> Algorithm:
    return Algorithm.model_validate({"group_size": 2, "prompts_per_step": 2, **changes})


def tokens(seed: int = 0, spread: float = 0.6) -> dict[str, torch.Tensor]:
    """Log-probs that lie `spread` apart, advantages of both signs, every third token outside the loss."""
    generator = torch.Generator().manual_seed(seed)
    base_T = -3 * torch.rand(T, generator=generator)
    near = {name: base_T + spread * torch.randn(T, generator=generator)
            for name in ("logprobs_T", "old_logprobs_T", "behaviour_logprobs_T", "reference_logprobs_T")}
    weights_T = torch.full((T,), 1 / 40)
    weights_T[::3] = 0.0
    return near | {"entropy_T": torch.rand(T, generator=generator), "weights_T": weights_T,
                   "advantages_T": torch.randn(T, generator=generator), "ages_T": torch.zeros(T, dtype=torch.int64),
                   "positions_T": torch.arange(T), "sequences": ONE}


def run(config: Algorithm, values: dict[str, torch.Tensor | None]):
    logprobs_T = values["logprobs_T"].clone().requires_grad_()
    entropy_T = None if values["entropy_T"] is None else values["entropy_T"].clone().requires_grad_()
    loss, sums = token_objective(config, **{**values, "logprobs_T": logprobs_T, "entropy_T": entropy_T})
    loss.backward()
    return loss.detach(), logprobs_T.grad, None if entropy_T is None else entropy_T.grad, sums


def by_hand(config: Algorithm, values: dict[str, torch.Tensor | None]) -> tuple[float, list[float]]:
    """Token by token with Python floats: the loss and its derivative by each log-prob."""
    loss, gradient = 0.0, []
    for t in range(T):
        pi, mu, advantage, weight, entropy = (values[name][t].item() for name in (
            "logprobs_T", "behaviour_logprobs_T", "advantages_T", "weights_T", "entropy_T"))
        if config.old_logprobs == "recompute":
            old = values["old_logprobs_T"][t].item()
            correction = min(math.exp(old - mu), config.importance_cap)
        elif config.updates_per_batch == 1 and config.epochs == 1:
            old, correction = pi, min(math.exp(pi - mu), config.importance_cap)
        else:
            old, correction = mu, 1.0
        ratio = math.exp(pi - old)
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        surrogate, slope = max((-advantage * ratio, -advantage * ratio), (-advantage * bounded,
                               -advantage * ratio if ratio == bounded else 0.0), key=lambda pair: pair[0])
        if config.dual_clip and advantage < 0 and surrogate > -advantage * config.dual_clip:
            surrogate, slope = -advantage * config.dual_clip, 0.0
        token_loss, derivative = correction * surrogate - config.entropy_coef * entropy, correction * slope
        if config.kl.beta:
            x = pi - values["reference_logprobs_T"][t].item()
            token_loss += config.kl.beta * (math.exp(-x) - 1 + x)
            derivative += config.kl.beta * (1 - math.exp(-x))
        loss += weight * token_loss
        gradient.append(weight * derivative)
    return loss, gradient


MODES = {
    "on-policy": {},
    "bypass": {"updates_per_batch": 2},
    "bypass, epochs": {"epochs": 2},
    "decoupled": {"updates_per_batch": 2, "old_logprobs": "recompute"},
    "decoupled, one update": {"old_logprobs": "recompute"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("terms", [{}, {"clip_high": 0.28, "dual_clip": 3.0, "entropy_coef": 0.01,
                                        "kl": {"beta": 0.1}, "importance_cap": 1.5}])
def test_value_and_gradient(mode, terms):
    config, values = algorithm(**MODES[mode], **terms), tokens()
    if config.old_logprobs == "none":
        values["old_logprobs_T"] = None
    if not config.kl.beta:
        values["reference_logprobs_T"] = None
    loss, gradient_T, entropy_gradient_T, _ = run(config, values)
    expected_loss, expected_gradient = by_hand(config, values)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradient_T.double(), torch.tensor(expected_gradient, dtype=torch.float64),
                               rtol=1e-4, atol=1e-7)
    expected_T = -config.entropy_coef * values["weights_T"]
    assert (entropy_gradient_T is None) == (config.entropy_coef == 0), "no gradient is none, not one of zeros"
    torch.testing.assert_close(torch.zeros(T) if entropy_gradient_T is None else entropy_gradient_T, expected_T)


def test_equal_numerics_make_the_on_policy_gradient_the_policy_gradient():
    values = tokens() | {"old_logprobs_T": None, "reference_logprobs_T": None, "entropy_T": None}
    values["behaviour_logprobs_T"] = values["logprobs_T"].clone()
    _, gradient_T, _, sums = run(algorithm(), values)
    torch.testing.assert_close(gradient_T, -values["weights_T"] * values["advantages_T"])
    assert sums["mismatch/kl"].item() == 0.0
    assert sums["train/ratio_mean"].item() == sums["train/tokens"].item()
    assert not {"train/entropy", "train/kl"} & sums.keys()


def test_old_is_not_behaviour():
    """With recomputed old log-probs equal to the current ones the ratio is 1 however far the engine is off."""
    values = tokens(spread=2.0) | {"reference_logprobs_T": None}
    values["old_logprobs_T"] = values["logprobs_T"].clone()
    _, _, _, sums = run(algorithm(old_logprobs="recompute", updates_per_batch=2), values)
    assert sums["train/ratio_mean"].item() == sums["train/tokens"].item()
    assert sums["correction/capped"].item() > 0 and sums["mismatch/kl"].item() > 1.0


def _mismatch_by_hand(trainer_T: torch.Tensor, values: dict[str, torch.Tensor]) -> dict[str, float]:
    kept = values["weights_T"] != 0
    x = (trainer_T.double() - values["behaviour_logprobs_T"].double())[kept]
    return {"mismatch/kl": (x.exp() - 1 - x).sum().item(), "mismatch/ratio_mean": x.exp().sum().item(),
            "mismatch/abs_mean": x.abs().sum().item(), "mismatch/abs_max": x.abs().max().item()}


@pytest.mark.parametrize("mode", MODES)
def test_mismatch_is_between_policies_of_equal_weights(mode):
    """Where the policy before the update is known the engine is held against it: the drift of later updates must not
    pass for numerics."""
    config, values = algorithm(**MODES[mode]), tokens() | {"reference_logprobs_T": None}
    known = config.old_logprobs == "recompute"
    twin_T = values["old_logprobs_T" if known else "logprobs_T"]
    if not known:
        values["old_logprobs_T"] = None
    sums = run(config, values)[3]
    for name, expected in _mismatch_by_hand(twin_T, values).items():
        assert sums[name].item() == pytest.approx(expected, rel=1e-5), name
    drifted = run(config, values | {"logprobs_T": values["logprobs_T"] - 1.0})[3]
    assert (drifted["mismatch/kl"].item() == sums["mismatch/kl"].item()) == known


@pytest.mark.parametrize("mode", MODES)
def test_mismatch_is_told_of_tokens_of_the_trainers_own_weights(mode):
    """Tokens of older weights are in the drift, and change nothing in the mismatch."""
    config, values = algorithm(**MODES[mode]), tokens() | {"reference_logprobs_T": None}
    known = config.old_logprobs == "recompute"
    twin_T = values["old_logprobs_T" if known else "logprobs_T"]
    if not known:
        values["old_logprobs_T"] = None
    values["ages_T"] = torch.arange(T) % 4
    sums = run(config, values)[3]
    fresh = values | {"weights_T": torch.where(values["ages_T"] == 0, values["weights_T"], 0.0)}
    for name, expected in _mismatch_by_hand(twin_T, fresh).items():
        assert sums[name].item() == pytest.approx(expected, rel=1e-5), name
    old = values | {"weights_T": torch.where(values["ages_T"] > 0, values["weights_T"], 0.0)}
    assert sums["drift/kl"].item() == pytest.approx(_mismatch_by_hand(twin_T, old)["mismatch/kl"], rel=1e-5)


def test_nothing_is_capped_where_nothing_is_corrected():
    values = tokens() | {"old_logprobs_T": None, "reference_logprobs_T": None}
    bypass = run(algorithm(updates_per_batch=2, importance_cap=1.0), values)[3]
    assert "correction/capped" not in bypass
    assert run(algorithm(importance_cap=1.0), values)[3]["correction/capped"].item() > 0.0


@pytest.mark.parametrize("mode", MODES)
def test_masked_tokens_do_not_matter_whatever_stands_there(mode):
    config = algorithm(**MODES[mode], kl={"beta": 0.1}, entropy_coef=0.01, dual_clip=3.0)
    values = tokens()
    if config.old_logprobs == "none":
        values["old_logprobs_T"] = None
    dirty = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    junk = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30])
    for name, value in dirty.items():
        if name in ("ages_T", "positions_T"):
            value[::3] = 10**6
        elif name not in ("weights_T", "sequences") and value is not None:
            value[::3] = junk.repeat(T)[:len(value[::3])]
    clean_run, dirty_run = run(config, values), run(config, dirty)
    torch.testing.assert_close(dirty_run[0], clean_run[0], rtol=0, atol=0)
    torch.testing.assert_close(dirty_run[1], clean_run[1], rtol=0, atol=0)
    assert dirty_run[3].keys() == clean_run[3].keys()
    for name, value in clean_run[3].items():
        torch.testing.assert_close(dirty_run[3][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_long_sequences_with_extreme_ratios_stay_finite(mode):
    """32,768 tokens whose log-ratios reach +-90, advantages of 0 among them."""
    config = algorithm(**MODES[mode], kl={"beta": 0.1}, entropy_coef=0.01)
    length = 32768
    ramp_T = torch.linspace(-90, 90, length)
    values = {"logprobs_T": ramp_T - 90, "behaviour_logprobs_T": torch.full((length,), -90.0),
              "old_logprobs_T": -ramp_T - 90 if config.old_logprobs == "recompute" else None,
              "reference_logprobs_T": -ramp_T - 90, "entropy_T": torch.ones(length),
              "advantages_T": torch.tensor([0.0, 1.0, -1.0, 0.0]).repeat(length // 4),
              "weights_T": torch.full((length,), 1 / length), "ages_T": torch.arange(length) // 4000,
              "positions_T": torch.arange(length), "sequences": ONE}
    loss, gradient_T, _, sums = run(config, values)
    assert math.isfinite(loss.item()) and torch.isfinite(gradient_T).all()
    assert all(math.isfinite(value.item()) for value in sums.values())


def test_sums_and_loss_add_up_over_micro_batches():
    config, values = algorithm(kl={"beta": 0.1}, clip_high=0.28), tokens() | {"old_logprobs_T": None}
    loss, gradient_T, _, sums = run(config, values)
    cuts = [slice(0, 3), slice(3, 3), slice(3, 50), slice(50, T)]
    parts = [run(config, {name: value[cut] if isinstance(value, torch.Tensor) else value
                          for name, value in values.items()})
             for cut in cuts]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient_T)
    for name, value in sums.items():
        values_P = torch.stack([part[3][name] for part in parts])
        torch.testing.assert_close(values_P.max() if name.endswith("_max") else values_P.sum(), value)


def test_nothing_in_the_loss_is_a_zero_gradient():
    values = tokens() | {"old_logprobs_T": None, "reference_logprobs_T": None, "weights_T": torch.zeros(T)}
    loss, gradient_T, _, sums = run(algorithm(), values)
    assert loss.item() == 0.0 and (gradient_T == 0).all()
    assert all(value.item() == 0.0 for value in sums.values())


def test_bfloat16_inputs_are_computed_in_float32():
    exact = {"ages_T", "positions_T", "sequences"}
    values = {name: value if name in exact else value.bfloat16() for name, value in tokens().items()} | {
        "old_logprobs_T": None, "reference_logprobs_T": None}
    loss, _, _, sums = run(algorithm(), values)
    exact, *_ = run(algorithm(), {name: v if name in exact or v is None else v.float() for name, v in values.items()})
    assert loss.dtype == torch.float32 and sums["mismatch/kl"].dtype == torch.float32
    torch.testing.assert_close(loss, exact)


@pytest.mark.parametrize("changes, values", [
    ({"old_logprobs": "recompute"}, {"old_logprobs_T": None}),
    ({}, {}),
    ({"old_logprobs": "recompute", "kl": {"beta": 0.1}}, {"reference_logprobs_T": None}),
    ({"old_logprobs": "recompute", "entropy_coef": 0.1}, {"entropy_T": None}),
])
def test_a_missing_or_superfluous_tensor_is_refused(changes, values):
    with pytest.raises(ValueError, match="algorithm.|entropy"):
        token_objective(algorithm(**changes), **{**tokens(), **values})
