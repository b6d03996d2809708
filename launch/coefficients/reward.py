"""Coefficients of `planner.time.reward`: what grading a completion costs."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coefficients.base import Coefficients, coefficient

_MEASURED = "measured: `make bench-rewards`, completions of 8,192 characters, on a core of an EPYC"
_ASSUMED = "assumed: between the built-in rewards and code that runs for a tenth of a second"


@dataclass(frozen=True)
class RewardCoefficients(Coefficients):
    PREFIX = "coefficients.reward"

    sample_s: float = coefficient(0.00001, "s", "CPU time of a reward process to receive and answer", _MEASURED)
    math_s: float = coefficient(0.0065, "s", "CPU time of `math` for a completion", _MEASURED)
    math_s_low: float = coefficient(0.0032, "s", "low end: groups of 16 that repeat answers", _MEASURED)
    math_s_high: float = coefficient(0.012, "s", "high end: every answer occurs once", _MEASURED)
    token_s: float = coefficient(
        2.3e-7, "s", "CPU time of `exact_match`, `format` or `length` per token of a completion", _MEASURED)
    token_s_low: float = coefficient(0.0, "s", "low end: `format` and `length`", _MEASURED)
    token_s_high: float = coefficient(2.5e-7, "s", "high end: `exact_match` of the last number", _MEASURED)
    user_s: float = coefficient(0.01, "s", "CPU time of a function of the user for a completion", _ASSUMED)
    user_s_low: float = coefficient(0.0005, "s", "low end", _ASSUMED)
    user_s_high: float = coefficient(0.1, "s", "high end", _ASSUMED)
    call_s: float = coefficient(
        0.01, "s", "a group's way to its reward processes and back to the driver",
        "assumed: two calls of Ray, pickling and the driver's event loop")
