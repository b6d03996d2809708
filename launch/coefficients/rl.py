"""Coefficients of `planner.time.step`: share of the parts' rates that an RL step reaches, and the time between the
parts."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import FACTOR, PART, Coefficients, coefficient

_FIT = "calibrated: launch/accuracy/rl_steps.py on benchmarks/measured/rl_steps.yaml"
_SPREAD = "quartile of the points of benchmarks/measured/rl_steps.yaml, at least 15 % from the value"


@dataclass(frozen=True)
class RlCoefficients(Coefficients):
    PREFIX = "coefficients.rl"

    train_efficiency: float = coefficient(
        0.833, "", "eta: share of the pre-training rate in RL training (padding, uneven batches, host work)", _FIT,
        FACTOR)
    train_efficiency_low: float = coefficient(0.71, "", "low end of eta", _SPREAD, FACTOR)
    train_efficiency_high: float = coefficient(0.96, "", "high end of eta", _SPREAD, FACTOR)
    mixture_efficiency: float = coefficient(
        0.613, "", "further factor on eta for mixtures of experts: few tokens per expert, uneven routing", _FIT,
        FACTOR)
    update_s: float = coefficient(
        1.13, "s", "fixed time of each optimizer step besides computation: distributing the batch, offloading", _FIT)
    logprob_factor: float = coefficient(
        0.883, "", "a log-prob pass over the forward part of training (rho is this times forward / training)", _FIT,
        FACTOR)
    logprob_factor_low: float = coefficient(0.75, "", "low end of the factor", _SPREAD, FACTOR)
    logprob_factor_high: float = coefficient(1, "", "high end of the factor", _SPREAD, FACTOR)
    rollout_efficiency: float = coefficient(
        0.816, "", "share of the engines' rate that RL generation reaches (uneven requests, wake-up)", _FIT, FACTOR)
    rollout_efficiency_low: float = coefficient(0.61, "", "low end of the efficiency", _SPREAD, FACTOR)
    rollout_efficiency_high: float = coefficient(0.94, "", "high end of the efficiency", _SPREAD, FACTOR)
    response_s: float = coefficient(
        0.002, "s", "time per response in a step: tokenising, gathering by the driver", _FIT)
    other_share: float = coefficient(
        0.0293, "", "advantages, data and logging over the sum of the phases", _FIT, PART)
    refit_s: float = coefficient(2.01, "s", "handing weights to engines of published systems, fixed part", _FIT)
    refit_tensor_s: float = coefficient(
        0.000282, "s", "handing weights to engines of published systems, per tensor", _FIT)
    refit_bandwidth: float = coefficient(
        1.17e10, "bytes/s", "handing weights to engines of published systems, whole model over the rest", _FIT)
