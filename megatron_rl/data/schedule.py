"""Which sequences train together: units that share one copy of their prompt, packed into equally many micro-batches.

The schedule is computed once on the global batch, by every rank alike, so that no rank can run another number of
micro-batches than its peers.
"""

from __future__ import annotations

import numpy as np

from launch.errors import UserError
from megatron_rl.data.batch import PolicyBatch

Unit = tuple[int, ...]
"""Sequences of the batch that are packed together. The first is whole; the others have its prompt, word for word, and
continue it: only their trajectories are packed."""
Schedule = tuple[tuple[tuple[Unit, ...], ...], ...]
"""`schedule[dp_rank][micro_batch]`: units; none where there are fewer units than places."""

# A sequence of L tokens is taken to cost L (1 + L / _ATTENTION_LENGTH): attention costs as much as the linear layers
# at roughly 12 hidden sizes.
_ATTENTION_LENGTH = 32_768


class InputTokens:
    """Tokens that sequences bring into a micro-batch, padded to `multiple`. The last sampled token of a trajectory, and
    what a tool wrote after it, predict nothing and stay outside."""

    def __init__(self, batch: PolicyBatch, multiple: int = 1) -> None:
        prompts_B = np.asarray(batch.prompt_lengths_B, np.int64)
        trajectories_B = trajectory_inputs(batch)
        self.whole: list[int] = _padded(prompts_B + trajectories_B, multiple).tolist()
        """A sequence with its prompt."""
        self.branch: list[int] = _padded(trajectories_B, multiple).tolist()
        """A sequence that continues the prompt of another."""
        self.multiple = multiple

    def unit(self, unit: Unit) -> int:
        return self.whole[unit[0]] + sum(self.branch[sequence] for sequence in unit[1:])

    def micro_batch(self, units: tuple[Unit, ...]) -> int:
        """Without a unit there is one document of padding (`pack`)."""
        return sum(map(self.unit, units)) or self.multiple


def trajectory_inputs(batch: PolicyBatch) -> np.ndarray:
    """Tokens of each trajectory that come before its last sampled one: what others of it are predicted from. int64
    [B]."""
    lengths_B = np.asarray(batch.lengths_B, np.int64)
    place_N = np.arange(len(batch.tokens_N)) - np.repeat(batch.offsets_B1[:-1], lengths_B)
    last_B = np.maximum.reduceat(np.where(batch.sampled_N, place_N, 0), batch.offsets_B1[:-1])
    return np.maximum(last_B - np.asarray(batch.prompt_lengths_B, np.int64), 0)


def make_schedule(batch: PolicyBatch, dp: int, token_budget: int, multiple: int = 1, micro_batch_multiple: int = 1,
                  share_prompts: bool = False, pipelined: bool = False) -> Schedule:
    """Distribute the batch over DP ranks and micro-batches: longest unit first, each to the cheapest place with room.

    Args:
        dp: data parallel size.
        token_budget: most tokens of a micro-batch, padding of the sequences to `multiple` included.
        multiple: each sequence is padded to a multiple of this (2 CP x TP under context or sequence parallelism).
        micro_batch_multiple: the number of micro-batches is a multiple of this (PP for interleaved schedules).
        share_prompts: neighbours in the batch with the same prompt form one unit. It is split where it is over the
            budget, and where a second copy of the prompt costs less than it takes from those that others wait for.
        pipelined: micro-batches wait for one another, not only the DP ranks.

    Returns:
        The same number of micro-batches for every DP rank; every sequence exactly once.

    Raises:
        UserError: a sequence alone is over the budget.
    """
    tokens = InputTokens(batch, multiple)
    _check_budget(tokens, token_budget)
    units = _within_budget(_groups(batch, share_prompts), tokens, token_budget)
    count = max(1, -(-sum(map(tokens.unit, units)) // (dp * token_budget)))
    while True:
        count = -(-count // micro_batch_multiple) * micro_batch_multiple
        filled = _fill(units, tokens, dp * count, token_budget)
        if filled is not None:
            break
        count += 1
    places = _level(filled, tokens, token_budget, waiting=dp * count if pipelined else dp)
    # Places are ordered by DP rank last: neighbours in cost go to different ranks.
    return tuple(tuple(tuple(sorted(places[m * dp + d])) for m in range(count)) for d in range(dp))


def _check_budget(tokens: InputTokens, token_budget: int) -> None:
    if tokens.whole and max(tokens.whole) > token_budget:
        worst = int(np.argmax(tokens.whole))
        raise UserError(
            f"sequence {worst} of the batch brings {tokens.whole[worst]} tokens into its micro-batch (its last sampled "
            f"token left out, padded to a multiple of {tokens.multiple}), which holds at most trainer.token_budget = "
            f"{token_budget}", where="trainer.token_budget",
            fix=f"set trainer.token_budget to at least {tokens.whole[worst]}, or lower rollout.max_new_tokens")


def _groups(batch: PolicyBatch, share_prompts: bool) -> list[Unit]:
    """Runs of neighbours with the same prompt; every sequence on its own without sharing."""
    starts_B = batch.offsets_B1[:-1]
    prompts = [batch.tokens_N[start:start + prompt].tobytes()
               for start, prompt in zip(starts_B, batch.prompt_lengths_B, strict=True)] if share_prompts else []
    units: list[Unit] = []
    for sequence in range(len(batch.lengths_B)):
        if share_prompts and sequence and prompts[sequence] == prompts[sequence - 1]:
            units[-1] += (sequence,)
        else:
            units.append((sequence,))
    return units


def _within_budget(units: list[Unit], tokens: InputTokens, token_budget: int) -> list[Unit]:
    """Halve units until each fits; one of a single sequence does."""
    fitting: list[Unit] = []
    waiting = units[::-1]
    while waiting:
        unit = waiting.pop()
        if tokens.unit(unit) <= token_budget:
            fitting.append(unit)
        else:
            waiting += _halves(unit)[::-1]
    return fitting


def _halves(unit: Unit) -> list[Unit]:
    middle = (len(unit) + 1) // 2
    return [unit[:middle], unit[middle:]]


def _fill(units: list[Unit], tokens: InputTokens, places: int, token_budget: int) -> list[list[Unit]] | None:
    """Units of each place; None if they do not fit."""
    lengths = [tokens.unit(unit) for unit in units]
    used, cost = np.zeros(places, np.int64), np.zeros(places)
    members: list[list[Unit]] = [[] for _ in range(places)]
    for number in np.argsort(-np.array(lengths, np.int64), kind="stable"):
        unit, length = units[number], lengths[number]
        place = int(np.where(used + length <= token_budget, cost, np.inf).argmin())
        if used[place] + length > token_budget:
            return None
        used[place] += length
        cost[place] += length * (1.0 + max(tokens.whole[sequence] for sequence in unit) / _ATTENTION_LENGTH)
        members[place].append(unit)
    return members


def _level(places: list[list[Unit]], tokens: InputTokens, token_budget: int, waiting: int) -> list[list[Unit]]:
    """Halve the largest unit of the fullest party as long as that makes the parties more even.

    `waiting` parties wait for one another; place p belongs to party p modulo `waiting`.
    """
    while True:
        load = _loads(places, tokens, waiting)
        fullest = int(np.argmax(load))
        divisible = [unit for place in places[fullest::waiting] for unit in place if _worth_halving(unit, tokens)]
        if not divisible:
            return places
        largest = max(divisible, key=tokens.unit)
        units = sorted(unit for place in places for unit in place if unit != largest)
        candidate = _fill(sorted([*units, *_halves(largest)]), tokens, len(places), token_budget)
        if candidate is None or sorted(_loads(candidate, tokens, waiting), reverse=True) >= sorted(load, reverse=True):
            return places
        places = candidate


def _worth_halving(unit: Unit, tokens: InputTokens) -> bool:
    """Whether the half that goes elsewhere takes more with it than its own copy of the prompt: ranks on a CPU share its
    cores, and there a copy is work for all."""
    if len(unit) == 1:
        return False
    half = _halves(unit)[1]
    prompt = tokens.whole[half[0]] - tokens.branch[half[0]]
    return tokens.unit(half) - prompt > prompt


def _loads(places: list[list[Unit]], tokens: InputTokens, waiting: int) -> list[int]:
    return [sum(tokens.unit(unit) for place in places[party::waiting] for unit in place) for party in range(waiting)]


def _padded(lengths_B: np.ndarray, multiple: int) -> np.ndarray:
    return -(-lengths_B // multiple) * multiple
