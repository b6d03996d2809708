"""Compares parameter counts of the measured files' models with `launch.planner.parameters`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.accuracy.interface import Predicted, measured
from launch.accuracy.points import Point
from launch.coefficients.base import Coefficients
from launch.planner.parameters import count

QUANTITIES: Mapping[str, str] = {"parameters": ""}
TYPICAL: Mapping[str, float] = {}


@dataclass(frozen=True)
class NoCoefficients(Coefficients):
    """Counting needs no coefficients."""

    PREFIX = "coefficients.parameters"


def predict(point: Point, coefficients: Coefficients) -> list[Predicted]:
    """The parameter count of a model whose exact count is published."""
    published = point.integer("measured.parameters")
    if published is None:
        return []
    if point.model is None:
        return [measured("parameters", published, None, point.model_problem)]
    return [measured("parameters", published, count(point.model))]


def calibrate(points: Sequence[Point], start: Coefficients) -> Coefficients:
    """There is nothing to calibrate."""
    return start


def default() -> Coefficients:
    return NoCoefficients()
