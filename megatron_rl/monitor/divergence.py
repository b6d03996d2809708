"""Detectors of diverging runs: pure functions from the history of metrics to coded warnings with evidence.

A history is the list of rows of metrics.jsonl, oldest first. Every detector looks only at its end, so it can be called
after each step, and reports nothing if its metric is absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

Row = Mapping[str, float]
WINDOW = 10
"""Number of steps in a mean."""


@dataclass(frozen=True)
class TrainingWarning:
    """A problem at `step`. `evidence` holds the numbers in the message."""

    code: str
    step: int
    message: str
    evidence: dict[str, float]

    def __str__(self) -> str:
        return f"{self.code} at step {self.step}: {self.message}"


def non_finite(history: Sequence[Row]) -> TrainingWarning | None:
    """A metric of the last step is NaN or infinite."""
    row = history[-1]
    bad = {name: float(value) for name, value in row.items() if not math.isfinite(float(value))}
    if not bad:
        return None
    return _warning("NON_FINITE", row, f"not finite: {', '.join(sorted(bad))}", bad)


def reward_collapse(history: Sequence[Row]) -> TrainingWarning | None:
    """The reward lost more than half of its gain, beyond three standard errors."""
    rewards = _series(history, "reward/mean")
    if len(rewards) < 3 * WINDOW:
        return None
    means = [fmean(rewards[i:i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]
    start, best, now = means[0], max(means), means[-1]
    noise = stdev(rewards[-WINDOW:]) / math.sqrt(WINDOW)
    if best - now <= max(0.5 * (best - start), 3 * noise) or best - start <= 3 * noise:
        return None
    return _warning("REWARD_COLLAPSE", history[-1],
                    f"mean reward {now:.3g} over {WINDOW} steps, down from {best:.3g} (start {start:.3g})",
                    {"start": start, "best": best, "now": now, "standard_error": noise})


def entropy_collapse(history: Sequence[Row]) -> TrainingWarning | None:
    """The policy has become deterministic (entropy under 5 % of its start) without any gain in reward. A teacher may
    be that deterministic."""
    entropy, rewards = _series(history, "train/entropy"), _series(history, "reward/mean")
    if _is_taught(history) or len(entropy) < 2 * WINDOW or len(rewards) < 2 * WINDOW:
        return None
    first, now = fmean(entropy[:3]), fmean(entropy[-WINDOW:])
    if now >= 0.05 * first or _has_learned(rewards):
        return None
    return _warning("ENTROPY_COLLAPSE", history[-1],
                    f"entropy {now:.3g} nats, {now / first:.1%} of its start, and the reward has not risen: "
                    "raise algorithm.entropy_coef or lower trainer.optimizer.lr",
                    {"entropy_start": first, "entropy": now, "reward": fmean(rewards[-WINDOW:])})


def no_signal(history: Sequence[Row]) -> TrainingWarning | None:
    """Nearly every group has equal rewards although the task is not solved, so there is no gradient. A teacher gives
    one without rewards."""
    shares, rewards = _series(history, "group/zero_variance"), _series(history, "reward/mean")
    if _is_taught(history) or len(shares) < WINDOW or min(shares[-WINDOW:]) < 0.95 or _has_learned(rewards):
        return None
    share = fmean(shares[-WINDOW:])
    return _warning("NO_SIGNAL", history[-1],
                    f"{share:.0%} of the groups have equal rewards for {WINDOW} steps: the prompts are too hard or "
                    "too easy for this policy, or group_size is too small",
                    {"zero_variance": share} | ({"reward": fmean(rewards[-WINDOW:])} if rewards else {}))


def mismatch_rising(history: Sequence[Row]) -> TrainingWarning | None:
    """Engine and trainer drift apart, because weights do not arrive or one side computes differently."""
    values = _series(history, "mismatch/kl")
    if len(values) < 3:
        return None
    start, now = median(values[:5]), median(values[-3:])
    if not (now > 0.1 or (len(values) >= 8 and now > 1e-2 and now > 10 * start)):
        return None
    return _warning("MISMATCH", history[-1],
                    f"KL between engine and trainer {now:.3g} nats (start {start:.3g}): the weights are not "
                    "arriving, or the two sides compute differently (temperature, precision, template)",
                    {"start": start, "now": now})


def grad_norm_explosion(history: Sequence[Row]) -> TrainingWarning | None:
    """Three consecutive gradient norms above ten times the median before them, or one above 100 times."""
    norms = _series(history, "train/grad_norm")
    if len(norms) < WINDOW + 3:
        return None
    usual = median(norms[-WINDOW - 13:-3])
    if usual <= 0 or not (min(norms[-3:]) > 10 * usual or norms[-1] > 100 * usual):
        return None
    return _warning("GRAD_NORM", history[-1], f"gradient norm {norms[-1]:.3g}, usually {usual:.3g}",
                    {"usual": usual, "now": norms[-1]})


def truncation(history: Sequence[Row]) -> TrainingWarning | None:
    """More than half of the trajectories are cut at the limit."""
    shares = _series(history, "response/truncated")
    if len(shares) < WINDOW or fmean(shares[-WINDOW:]) <= 0.5:
        return None
    share = fmean(shares[-WINDOW:])
    return _warning("TRUNCATION", history[-1],
                    f"{share:.0%} of the trajectories end at rollout.max_new_tokens: raise it, or reward length",
                    {"truncated": share})


def reward_errors(history: Sequence[Row]) -> TrainingWarning | None:
    """The rewards of many trajectories fail, so that the batch is smaller than it looks and leaves out whatever the
    grader cannot read."""
    shares = _series(history, "reward/errors")
    if len(shares) < WINDOW or fmean(shares[-WINDOW:]) <= 0.05:
        return None
    share = fmean(shares[-WINDOW:])
    return _warning("REWARD_ERRORS", history[-1],
                    f"the rewards of {share:.0%} of the trajectories failed over {WINDOW} steps, which leaves them out "
                    "of the loss: failed_samples has examples", {"errors": share})


DETECTORS = (non_finite, reward_collapse, entropy_collapse, no_signal, mismatch_rising, grad_norm_explosion,
             truncation, reward_errors)


class Detectors:
    """Calls every detector after each step. A code is reported again only after `quiet_steps`. `history` holds the rows
    of the run's earlier attempts."""

    def __init__(self, history: Sequence[Row] = (), quiet_steps: int = 50) -> None:
        self._quiet_steps = quiet_steps
        self._history: list[Row] = list(history)
        self._told: dict[str, int] = {}

    def check(self, row: Row) -> list[TrainingWarning]:
        """Add `row`, which has a `step`. Returns the new warnings."""
        self._history.append(row)
        warnings = [warning for detector in DETECTORS if (warning := detector(self._history))]
        new = [f for f in warnings if f.step - self._told.get(f.code, -self._quiet_steps) >= self._quiet_steps]
        self._told |= {warning.code: warning.step for warning in new}
        return new


def _series(history: Sequence[Row], name: str) -> list[float]:
    values = [float(row[name]) for row in history if name in row]
    return [value for value in values if math.isfinite(value)]


def _is_taught(history: Sequence[Row]) -> bool:
    return "distill/kl" in history[-1]


def _has_learned(rewards: Sequence[float]) -> bool:
    """Whether the reward has risen from its start by more than three standard errors."""
    if len(rewards) < 2 * WINDOW:
        return False
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    noise = math.hypot(stdev(first), stdev(last)) / math.sqrt(WINDOW)
    return fmean(last) - fmean(first) > max(3 * noise, 1e-9)


def _warning(code: str, row: Row, message: str, evidence: dict[str, float]) -> TrainingWarning:
    return TrainingWarning(code, int(row.get("step", 0)), message, evidence)
