"""Distributions of response lengths, with the moments and order statistics that the planner's models need. `LogNormal`
has a given mean under a cap. `Counted` is a histogram, a file of completions, or one fixed length.

A cap ends a response: one that would be longer has exactly `cap` tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from launch.errors import UserError
from launch.planner.workload import log_normal
from launch.planner.workload.lengths_file import read

LONGEST = 10_000_000
"""Maximum tokens of a response. A longer one is a mistake in the input."""


class Lengths(ABC):
    """A distribution of response lengths in tokens."""

    cap: int
    """The longest response."""
    mean: float

    @property
    @abstractmethod
    def second_moment(self) -> float:
        """E[l^2]."""

    @property
    @abstractmethod
    def capped_share(self) -> float:
        """Fraction of the responses that reach `cap`."""

    @abstractmethod
    def survival(self, length: float) -> float:
        """P(l > length): the fraction of responses that are still running after `length` tokens."""

    @abstractmethod
    def quantile(self, share: float) -> float:
        """The smallest length that a fraction `share` of the responses does not exceed."""

    @abstractmethod
    def expected_max(self, count: float) -> float:
        """E[longest of `count` responses] = integral over [0, cap] of 1 - F(l)^count."""

    @abstractmethod
    def capped(self, cap: int) -> Lengths:
        """The same responses under another cap. Raises UserError if the cap contradicts the mean."""

    @property
    def mean_residual(self) -> float:
        """E[l^2] / (2 E[l]): mean tokens that an active response has generated, and has left, in steady state."""
        return self.second_moment / (2 * self.mean)

    def active_context(self, prompt: float) -> float:
        """Mean context of a response while it is generated, in steady state. It exceeds prompt + mean / 2 if lengths
        differ, since long responses stay longer."""
        return prompt + self.mean_residual

    def attention_length(self, prompt: float) -> float:
        """E[t^2] / E[t] over sequences t = prompt + response. Causal attention costs as if all had this length."""
        return (prompt * prompt + 2 * prompt * self.mean + self.second_moment) / (prompt + self.mean)

    def group_capped(self, group: int) -> float:
        """P(at least one of `group` responses reaches the cap)."""
        return 1 - (1 - self.capped_share) ** group

    @abstractmethod
    def residual_survival(self, length: float) -> float:
        """P(an active response has more than `length` tokens left), in steady state (renewal theory)."""

    @cached_property
    def profile(self) -> tuple[tuple[float, float, float, float], ...]:
        """(start, end, mean survival, mean residual survival) of about 40 intervals of [0, cap], for integrals along
        the generation. Intervals are shorter where more responses end."""
        edges = sorted({0.0, float(self.cap), *(self.quantile(i / 20) for i in range(1, 20)),
                        *(self.cap * i / 20 for i in range(1, 20))})
        return tuple((a, b, self._mean_survival(a, b), self._mean_residual_survival(a, b))
                     for a, b in pairwise(edges) if b - a > 1e-9)

    def _mean_survival(self, start: float, end: float) -> float:
        # mean of S over [a, b]: (E min(l, b) - E min(l, a)) / (b - a); residual survival at a: 1 - E min(l, a) / E l
        return (self.residual_survival(start) - self.residual_survival(end)) * self.mean / (end - start)

    def _mean_residual_survival(self, start: float, end: float) -> float:
        middle = (start + end) / 2
        return (self.residual_survival(start) + 4 * self.residual_survival(middle) + self.residual_survival(end)) / 6


@dataclass(frozen=True)
class LogNormal(Lengths):
    """Log-normal lengths of shape `sigma`, cut at `cap`. `mean` is the mean after the cut, and the location mu is
    solved for it. So a change of the tail keeps the number of generated tokens."""

    mean: float
    sigma: float
    cap: int

    def __post_init__(self) -> None:
        _check_cap(self.cap)
        if not 1 <= self.mean < math.inf:
            raise UserError(f"a mean response length of {self.mean:g} tokens is impossible", fix="a number from 1 on")
        if not 0.01 <= self.sigma <= 5:
            raise UserError(f"sigma = {self.sigma:g} is not a valid shape of a log-normal length distribution",
                            fix="a number from 0.01 to 5; reasoning models show 0.6 to 1.1; for equal lengths "
                                "use a fixed length")
        if self.mean >= self.cap:
            raise UserError(f"a mean response length of {self.mean:g} cannot come from responses that end at "
                            f"{self.cap} tokens", fix=f"a mean below {self.cap}, or a higher cap")
        if self.mean > 0.999 * self.cap:
            raise UserError(f"a mean response length of {self.mean:g} under a cap of {self.cap} leaves no "
                            "distribution: nearly all responses are cut",
                            fix="a lower mean, a higher cap, or a fixed length")

    def capped(self, cap: int) -> LogNormal:
        return replace(self, cap=cap)

    @cached_property
    def mu(self) -> float:
        """Location of the logarithm for which the mean of min(l, cap) is `mean`."""
        return log_normal.location(self.mean, self.sigma, self.cap)

    @property
    def _z_cap(self) -> float:
        return (math.log(self.cap) - self.mu) / self.sigma

    @cached_property
    def second_moment(self) -> float:
        z, s = self._z_cap, self.sigma
        return (math.exp(2 * self.mu + 2 * s * s) * log_normal.cdf(z - 2 * s) + self.cap ** 2 * log_normal.cdf(-z))

    @cached_property
    def capped_share(self) -> float:
        return log_normal.cdf(-self._z_cap)

    def survival(self, length: float) -> float:
        if length <= 0:
            return 1.0
        return 0.0 if length >= self.cap else log_normal.cdf((self.mu - math.log(length)) / self.sigma)

    def residual_survival(self, length: float) -> float:
        if length <= 0:
            return 1.0
        return max(0.0, 1 - log_normal.capped_mean(self.mu, self.sigma, min(length, self.cap)) / self.mean)

    def quantile(self, share: float) -> float:
        if not 0 <= share <= 1:
            raise ValueError(f"{share} is not between 0 and 1")
        return min(float(self.cap), math.exp(self.mu + self.sigma * log_normal.inverse_cdf(share)))

    def expected_max(self, count: float) -> float:
        return log_normal.expected_max(self.mu, self.sigma, self.cap, count)


@dataclass(frozen=True)
class Counted(Lengths):
    """Lengths and how often they occur: a histogram, measured completions, or one fixed length."""

    counts: tuple[tuple[int, float], ...]
    """(length, share) in ascending order of length."""
    cap: int
    """The longest possible length; at least the longest that occurs."""
    source: str = ""
    """The file or key of the lengths; empty for assumed ones."""
    mean: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", math.fsum(length * share for length, share in self.counts))

    @staticmethod
    def of(weights: Mapping[int, float], cap: int | None = None, *, source: str = "") -> Counted:
        """From length -> weight. Weights may have any scale.

        Args:
            cap: longer lengths count as `cap`; None: the longest that occurs is the cap.
            source: file or key, for messages.
        """
        where = source or None
        if cap is not None:
            _check_cap(cap)
        merged: dict[int, float] = {}
        for length, weight in weights.items():
            if isinstance(length, bool) or not isinstance(length, int) or not 0 < length <= LONGEST:
                raise UserError(f"{length!r} is not a response length", where=where,
                                fix="a whole number of tokens above 0")
            if not 0 <= weight < math.inf:
                raise UserError(f"response length {length} has weight {weight!r}", where=where,
                                fix="a weight of 0 or more")
            if weight > 0:
                length = length if cap is None else min(length, cap)
                merged[length] = merged.get(length, 0.0) + weight
        total = math.fsum(merged.values())
        if not 0 < total < math.inf:
            raise UserError("no response lengths given" if not weights else
                            "the weights of the response lengths do not add up to a number above 0", where=where,
                            fix="give at least one length a weight above 0")
        return Counted(tuple((length, merged[length] / total) for length in sorted(merged)),
                       max(merged) if cap is None else cap, source)

    @staticmethod
    def fixed(length: int) -> Counted:
        """Every response has `length` tokens."""
        return Counted.of({length: 1.0})

    @staticmethod
    def from_file(path: str | Path, cap: int | None = None) -> Counted:
        """Measured lengths from a JSONL of completions: see `lengths_file.read`."""
        return Counted.of(read(path), cap, source=str(path))

    def capped(self, cap: int) -> Counted:
        return Counted.of(dict(self.counts), cap, source=self.source)

    @property
    def capped_share(self) -> float:
        length, share = self.counts[-1]
        return share if length == self.cap else 0.0

    @cached_property
    def second_moment(self) -> float:
        return math.fsum(length * length * share for length, share in self.counts)

    @cached_property
    def _steps(self) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """Lengths, P(l <= length) and E[min(l, length)] at each."""
        below, partial, cumulative, sums = 0.0, 0.0, [], []
        for length, share in self.counts:
            below, partial = below + share, partial + share * length
            cumulative.append(min(1.0, below))
            sums.append(partial + length * max(0.0, 1 - below))
        cumulative[-1], sums[-1] = 1.0, self.mean
        return tuple(length for length, _ in self.counts), tuple(cumulative), tuple(sums)

    def survival(self, length: float) -> float:
        lengths, cumulative, _ = self._steps
        at = _last_not_above(lengths, length)
        return 1.0 if at < 0 else 1 - cumulative[at]

    def residual_survival(self, length: float) -> float:
        lengths, cumulative, sums = self._steps
        at = _last_not_above(lengths, length)
        if at < 0:
            return 1 - max(0.0, length) / self.mean
        return max(0.0, 1 - (sums[at] + (length - lengths[at]) * (1 - cumulative[at])) / self.mean)

    def quantile(self, share: float) -> float:
        if not 0 <= share <= 1:
            raise ValueError(f"{share} is not between 0 and 1")
        lengths, cumulative, _ = self._steps
        return float(next(length for length, below in zip(lengths, cumulative, strict=True)
                          if below >= share - 1e-12))

    def expected_max(self, count: float) -> float:
        lengths, cumulative, _ = self._steps
        below = (0.0, *(c ** count for c in cumulative))
        return math.fsum(length * (high - low) for length, low, high in zip(lengths, below, below[1:], strict=False))


def _check_cap(cap: int) -> None:
    if not 0 < cap <= LONGEST:
        raise UserError(f"a response cap of {cap} tokens is impossible", fix=f"a whole number from 1 to {LONGEST}")


def _last_not_above(values: tuple[int, ...], value: float) -> int:
    return bisect_right(values, value) - 1
