"""The policy loss of a batch as plain loops over Python floats, sequence by sequence: the truth of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.config.schema import Algorithm


@dataclass(frozen=True)
class Token:
    """A token in the loss."""

    current: float
    behaviour: float
    advantage: float
    weight: float
    """Share of the token's loss in the batch's."""
    old: float = math.nan
    age: int = 0


@dataclass(frozen=True)
class Loss:
    value: float
    slopes: list[list[float]]
    """Derivative by each token's current log-prob."""
    kept: list[list[bool]]
    weights: list[list[float]]
    """Importance weights before the cap."""


def policy_loss(config: Algorithm, batch: Sequence[Sequence[Token]]) -> Loss:
    """The policy loss without KL and entropy terms."""
    loss = Loss(0.0, [], [], [])
    value = 0.0
    for sequence in batch:
        old = [_old(config, token) for token in sequence]
        behind = [o - token.behaviour for o, token in zip(old, sequence, strict=True)]
        ahead = [token.current - o for o, token in zip(old, sequence, strict=True)]
        left = sum(token.behaviour - token.current for token in sequence) / max(1, len(sequence))
        slopes, kept, weights = [], [], []
        for token, b, a in zip(sequence, behind, ahead, strict=True):
            ratio = math.exp(sum(ahead) / len(sequence)) if config.loss == "gspo" else math.exp(a)
            surrogate, slope = _surrogate(config, token, ratio)
            weight = math.exp(sum(behind)) if config.importance_weight == "sequence" else math.exp(b)
            keep = _keeps(config, token, b, sum(behind), len(sequence), left)
            applied = min(weight, config.importance_cap) if _weighs(config) else 1.0
            value += token.weight * keep * applied * surrogate
            slopes.append(token.weight * keep * applied * slope)
            kept.append(keep)
            weights.append(weight)
        loss.slopes.append(slopes)
        loss.kept.append(kept)
        loss.weights.append(weights)
    return Loss(value, loss.slopes, loss.kept, loss.weights)


def _several_steps(config: Algorithm) -> bool:
    return config.updates_per_batch > 1 or config.epochs > 1


def _old(config: Algorithm, token: Token) -> float:
    if config.old_logprobs == "recompute":
        return token.old
    if config.old_logprobs == "interpolate":
        # The version that the update makes is age + 1 after the token's, the one at its start is age after it.
        return token.behaviour + (token.current - token.behaviour) * token.age / (token.age + 1)
    return token.behaviour if _several_steps(config) else token.current


def _weighs(config: Algorithm) -> bool:
    bypass = config.old_logprobs == "none" and _several_steps(config)
    return config.importance_weight != "none" and config.importance_cap is not None and not bypass


def _surrogate(config: Algorithm, token: Token, ratio: float) -> tuple[float, float]:
    """The loss of a token and its derivative by the log-prob."""
    a, high, low = token.advantage, 1 + config.clip_high, 1 - config.clip_low
    if config.loss == "cispo":
        return -min(ratio, high) * a * token.current, -min(ratio, high) * a
    if a >= 0:
        return -a * min(ratio, high), -a * ratio if ratio <= high else 0.0
    if config.dual_clip is not None and ratio > config.dual_clip:
        return -a * config.dual_clip, 0.0
    return -a * max(ratio, low), -a * ratio if ratio >= low else 0.0


def _keeps(config: Algorithm, token: Token, behind: float, total: float, length: int, left: float) -> bool:
    rule, low, high = config.rejection.rule, config.rejection.low, config.rejection.high
    if rule == "none":
        return True
    if rule == "off_policy":
        return token.advantage >= 0 or left <= high
    return low <= math.exp({"icepop": behind, "sequence": total, "geometric": total / length}[rule]) <= high
