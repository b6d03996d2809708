"""The interface of one kind of measured points: a module `launch/accuracy/<kind>.py` with the names in `KindModule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.accuracy.points import Point
from launch.coefficients.base import Coefficients

KINDS = ("parameters", "memory", "training", "decode", "rl_steps", "weight_sync", "collectives")
"""In the order of the printed tables. `parameters` is made from the models of every file; the others are file kinds."""

VERDICTS = ("fits",)
"""Quantities that are 1 (yes) or 0 (no). They are counted as right or wrong and enter no median."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """One measured quantity of a point with the model's prediction."""

    quantity: str
    """A key of the module's `QUANTITIES`: step_time_s, peak_memory_bytes, fits, ..."""
    measured_low: float
    measured_high: float
    """Equal to `measured_low` unless the source publishes a range."""
    predicted: float | None
    """None if the model cannot predict it, see `reason`."""
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Signed relative error, 0 within a range and measured from its nearer end outside. For a verdict: 0 if right,
        +1 for a wrong yes, -1 for a wrong no."""
        if self.predicted is None:
            return None
        end = min(max(self.predicted, self.measured_low), self.measured_high)
        return (self.predicted - end) / (end or 1.0)


def measured(quantity: str, value: float, predicted: float | None, reason: str = "") -> Predicted:
    """A quantity measured as one value."""
    return Predicted(quantity, value, value, predicted, reason)


class KindModule(Protocol):
    """The names that `launch/accuracy/<kind>.py` defines at module level.

    `predict` never raises for a point with fields that are null, `not_stated`, unknown or absent: it returns a
    `Predicted` for each measured quantity with `predicted=None` and the reason. It returns [] only for a point without
    measurements. It never looks at a point's id, source or framework, except for the engine class.

    A memory point that is known to have run out of memory gives `Predicted("fits", 0, 0, ...)`. A point that ran may
    give `Predicted("fits", 1, 1, ...)`.

    A module may also have `class_of(point) -> str`. Classes share no coefficients, so points of one class do not
    constrain another.
    """

    QUANTITIES: Mapping[str, str]
    """Quantity -> unit ("s", "bytes", "tokens/s", "" for verdicts and counts)."""

    TYPICAL: Mapping[str, float]
    """Fitted coefficient -> a neutral value: the start of the search, and the value of a coefficient that no point
    constrains."""

    def predict(self, point: Point, coefficients: Coefficients) -> list[Predicted]: ...

    def calibrate(self, points: Sequence[Point], start: Coefficients) -> Coefficients:
        """Coefficients fitted to `points`, which are of this kind. Points with `not point.calibrates` are ignored. The
        search starts at `TYPICAL`; coefficients that no point constrains keep their values from `start`. It is
        deterministic and takes at most about 5 s for the development points, because leave-one-source-out runs it once
        per source. Kinds without coefficients return `start`."""

    def default(self) -> Coefficients:
        """The shipped coefficients."""


class SyncModule(KindModule, Protocol):
    """`launch/accuracy/weight_sync.py`."""

    def lower_bound_s(self, point: Point, coefficients: Coefficients) -> float | None:
        """Lower bound of the time of any route; None if the point does not state enough."""
