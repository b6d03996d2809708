"""The log-normal distribution cut at a cap: min(l, cap), where ln l has mean `mu` and standard deviation `sigma`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

_RULE = ((0.1834346424956498, 0.3626837833783620), (0.5255324099163290, 0.3137066458778873),
         (0.7966664774136267, 0.2223810344533745), (0.9602898564975363, 0.1012285362903763))
"""Abscissae (of either sign) and weights of the 8-point Gauss-Legendre rule (Abramowitz and Stegun, table 25.4)."""


def cdf(z: float) -> float:
    """Distribution function of the standard normal."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def inverse_cdf(share: float) -> float:
    """The inverse of `cdf`, by bisection, exact to the last digits. A distribution calls it a few dozen times."""
    low, high = -38.0, 38.0
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle) < share else (low, middle)
    return (low + high) / 2


def capped_mean(mu: float, sigma: float, cap: float) -> float:
    """E[min(l, cap)]."""
    z = (math.log(cap) - mu) / sigma
    return math.exp(mu + sigma * sigma / 2) * cdf(z - sigma) + cap * cdf(-z)


@lru_cache(maxsize=256)
def location(mean: float, sigma: float, cap: int) -> float:
    """The mu for which E[min(l, cap)] = mean, with 0 < mean < cap. The capped mean rises with mu from 0 to cap."""
    low, high = math.log(mean) - sigma * sigma - 1, math.log(cap) + 10 * sigma + 1
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if capped_mean(middle, sigma, cap) < mean else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=4096)
def expected_max(mu: float, sigma: float, cap: int, count: float) -> float:
    """Expected maximum of `count` draws: L - integral over [0, L] of F(l)^count, with l = exp(mu + sigma z). L is the
    cap, or a length that no draw exceeds (ten standard deviations)."""
    top = min((math.log(cap) - mu) / sigma, 10.0)
    longest = min(cap, math.exp(mu + sigma * top))
    return longest - integral(lambda z: cdf(z) ** count * sigma * math.exp(mu + sigma * z), min(-10.0, top - 1), top)


def integral(function: Callable[[float], float], low: float, high: float, pieces: int = 24) -> float:
    """Integral of a smooth function over [low, high] to about ten digits: the rule on each of `pieces` equal parts."""
    half = (high - low) / (2 * pieces)
    total = 0.0
    for i in range(pieces):
        middle = low + (2 * i + 1) * half
        for x, weight in _RULE:
            total += weight * (function(middle - half * x) + function(middle + half * x))
    return total * half
