"""What one kind of measured point owes the validation: a module `launch/validate/<kind>.py` with the names of
`KindModule`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.coefficients.base import Coefficients
from launch.validate.points import Point

KINDS = ("parameters", "memory", "training", "decode", "rl_steps", "weight_sync", "collectives")
"""In the order of the printed tables. All but `parameters` (made from the models of every file) are file kinds."""

VERDICTS = ("fits",)
"""Quantities that are 1 (yes) or 0 (no): counted right or wrong, in no median."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """One measured quantity of a point beside what the model says."""

    quantity: str
    """A key of the module's `QUANTITIES`: step_time_s, peak_memory_bytes, fits, ..."""
    measured_low: float
    measured_high: float
    """Equal to `measured_low` unless the source publishes a range."""
    predicted: float | None
    """None: the model cannot say, see `reason`."""
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Signed relative error, 0 inside a range and counted from its nearer end outside. For a verdict: 0 where
        right, +1 for a yes that was a no, -1 for the opposite."""
        if self.predicted is None:
            return None
        end = min(max(self.predicted, self.measured_low), self.measured_high)
        return (self.predicted - end) / (end or 1.0)


def measured(quantity: str, value: float, predicted: float | None, reason: str = "") -> Predicted:
    """A quantity measured as one figure."""
    return Predicted(quantity, value, value, predicted, reason)


class KindModule(Protocol):
    """The names that `launch/validate/<kind>.py` defines at module level.

    `predict` never raises for a point whose fields are null, `not_stated`, unknown or absent: it returns the
    `Predicted` of each measured quantity with `predicted=None` and the reason. It returns [] only for a point that
    has nothing measured. It never looks at a point's id, source or framework (an engine class excepted).

    A memory point that is known to have run out of memory gives `Predicted("fits", 0, 0, ...)`, one that ran may give
    `Predicted("fits", 1, 1, ...)`.

    A module may also have `class_of(point) -> str`: classes that share no coefficient, so that points of one say
    nothing about another.
    """

    QUANTITIES: Mapping[str, str]
    """Quantity -> unit ("s", "bytes", "tokens/s", "" for verdicts and counts)."""

    TYPICAL: Mapping[str, float]
    """Fitted coefficient -> a neutral value: where the search starts, and what a coefficient keeps of which no point
    says anything."""

    def predict(self, point: Point, coefficients: Coefficients) -> list[Predicted]: ...

    def calibrate(self, points: Sequence[Point], start: Coefficients) -> Coefficients:
        """Coefficients fitted to `points` (of this kind; it leaves out those with `not point.calibrates`). The search
        starts at `TYPICAL`; `start` gives the coefficients of which no point says anything. Deterministic, at most
        about 5 s for the development points: leave-one-source-out runs it once a source. Kinds that calibrate nothing
        return `start`."""

    def default(self) -> Coefficients:
        """The shipped coefficients."""


class SyncModule(KindModule, Protocol):
    """`launch/validate/weight_sync.py`."""

    def lower_bound_s(self, point: Point, coefficients: Coefficients) -> float | None:
        """The time below which no route can be; None where a point does not say enough."""
