"""The optimiser of all calibrations: cyclic coordinate search in log space, deterministic and without derivatives. Its
result depends only on the points, the start and the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from launch.coefficients.base import Coefficients

C = TypeVar("C", bound=Coefficients)
Run = TypeVar("Run")


def search(cost: Callable[[Mapping[str, float]], float], start: Mapping[str, float], *,
           bounds: Mapping[str, tuple[float, float]] | None = None, step: float = 0.4, tolerance: float = 0.002,
           evaluations: int = 400) -> dict[str, float]:
    """Find positive parameters that make `cost` small.

    Each parameter in turn is multiplied and divided by e^step. A change that lowers the cost is kept and repeated in
    the same direction. A round without improvement halves the step, until it is below `tolerance` (relative).

    Args:
        cost: a finite number for every parameter set within the bounds.
        start: name -> value > 0, in the order of the search.
        bounds: name -> (low, high) for parameters with physical limits (an efficiency is at most 1).
        step: first step, relative (0.4: a factor of 1.5).
        tolerance: last step.
        evaluations: maximum number of calls of `cost`.

    Returns:
        Name -> value, within the bounds, with a cost of at most the start's.
    """
    limits = {name: (bounds or {}).get(name, (0.0, math.inf)) for name in start}
    best = {name: _clip(value, limits[name]) for name, value in start.items()}
    if any(value <= 0 for value in best.values()):
        raise ValueError(f"the search is in log space, a parameter is not positive: {best}")
    lowest, left = cost(best), evaluations - 1
    while step > tolerance and left > 0:
        improved = False
        for name in start:
            for direction in (step, -step):
                before = lowest
                while left > 0:
                    tried = {**best, name: _clip(best[name] * math.exp(direction), limits[name])}
                    if tried[name] == best[name]:
                        break
                    left -= 1
                    value = cost(tried)
                    if value >= lowest:
                        break
                    best, lowest, improved = tried, value, True
                if lowest < before:     # the other direction leads back
                    break
        if not improved:
            step /= 2
    return best


def fit_regimes(start: C, regimes: Mapping[str, Sequence[Run]], error: Callable[[Run, C], float],
                typical: Mapping[str, float], limits: Mapping[str, tuple[float, float]], *, hold: float,
                scale: float = 0.1, step: float = 0.4, evaluations: int = 400) -> C:
    """Fit the coefficients in `typical`. The mean robust error of each regime is weighted by the square root of its
    number of runs, so that a long table does not outweigh a short one.

    Args:
        error: logarithmic error of a run.
        hold: cost of a coefficient that is e times its typical value.
        scale: errors beyond this count linearly.
    """
    def cost(values: Mapping[str, float]) -> float:
        coefficients = start.changed(dict(values))
        fit = sum(len(runs) ** 0.5 * robust_mean([error(run, coefficients) for run in runs], scale)
                  for runs in regimes.values())
        return fit + hold * sum(log_error(values[name], typical[name]) ** 2 for name in values)

    return start.changed(rounded(search(cost, typical, bounds=limits, step=step, evaluations=evaluations)))


def _clip(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])


def log_error(predicted: float, measured: float) -> float:
    """ln(predicted / measured): symmetric between half and twice."""
    return math.log(predicted / measured)


def robust_mean(errors: Sequence[float], scale: float = 0.1) -> float:
    """Mean of scale^2 (sqrt(1 + (e/scale)^2) - 1): quadratic near 0, linear beyond `scale`, so that one odd source does
    not distort the fit (pseudo-Huber loss)."""
    if not errors:
        return 0.0
    return sum(scale * scale * (math.sqrt(1 + (error / scale) ** 2) - 1) for error in errors) / len(errors)


def median(values: Sequence[float]) -> float:
    """The median; 0 for an empty sequence."""
    ordered, middle = sorted(values), len(values) // 2
    if not ordered:
        return 0.0
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def rounded(values: Mapping[str, float], digits: int = 3) -> dict[str, float]:
    """Values rounded to three significant digits, like the shipped defaults."""
    return {name: float(f"{value:.{digits}g}") for name, value in values.items()}
