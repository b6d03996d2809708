"""Schedules sequences as units that share one copy of their prompt, in the same number of micro-batches on every rank.

Every rank computes the same schedule from the global batch, so no rank can run a different number of micro-batches.
"""

from __future__ import annotations

import numpy as np

from launch.errors import UserError
from megatron_rl.data.batch import PolicyBatch

Unit = tuple[int, ...]
"""Sequences of the batch that are packed together. The first is packed completely. The others have exactly the same
prompt, so only their trajectories are packed."""
Schedule = tuple[tuple[tuple[Unit, ...], ...], ...]
"""`schedule[dp_rank][micro_batch]`: units. A micro-batch is empty if there are fewer units than micro-batches."""

# The assumed cost of a sequence of L tokens is L (1 + L / _ATTENTION_LENGTH): attention costs as much as the linear
# layers at a length of roughly 12 hidden sizes.
_ATTENTION_LENGTH = 32_768


class InputTokens:
    """Numbers of tokens that sequences add to a micro-batch, padded to `multiple`. The last sampled token of a
    trajectory and any tool output after it predict nothing and are not packed."""

    def __init__(self, batch: PolicyBatch, multiple: int = 1) -> None:
        prompts_B = np.asarray(batch.prompt_lengths_B, np.int64)
        trajectories_B = trajectory_inputs(batch)
        self.whole: list[int] = _padded(prompts_B + trajectories_B, multiple).tolist()
        """For a sequence with its prompt."""
        self.branch: list[int] = _padded(trajectories_B, multiple).tolist()
        """For a sequence that continues the prompt of another."""
        self.multiple = multiple

    def unit(self, unit: Unit) -> int:
        return self.whole[unit[0]] + sum(self.branch[sequence] for sequence in unit[1:])

    def micro_batch(self, units: tuple[Unit, ...]) -> int:
        """A micro-batch without units is one document of padding (`pack`)."""
        return sum(map(self.unit, units)) or self.multiple


def trajectory_inputs(batch: PolicyBatch) -> np.ndarray:
    """Number of tokens of each trajectory before its last sampled token. Only these predict tokens. int64 [B]."""
    lengths_B = np.asarray(batch.lengths_B, np.int64)
    place_N = np.arange(len(batch.tokens_N)) - np.repeat(batch.offsets_B1[:-1], lengths_B)
    last_B = np.maximum.reduceat(np.where(batch.sampled_N, place_N, 0), batch.offsets_B1[:-1])
    return np.maximum(last_B - np.asarray(batch.prompt_lengths_B, np.int64), 0)


def make_schedule(batch: PolicyBatch, dp: int, token_budget: int, multiple: int = 1, micro_batch_multiple: int = 1,
                  share_prompts: bool = False, pipelined: bool = False) -> Schedule:
    """Distribute the batch over DP ranks and micro-batches: longest unit first, each to the cheapest place with room.

    Args:
        dp: data parallel size.
        token_budget: maximum number of tokens in a micro-batch, including the padding of sequences to `multiple`.
        multiple: each sequence is padded to a multiple of this (2 CP x TP under context or sequence parallelism).
        micro_batch_multiple: the number of micro-batches is a multiple of this (PP for interleaved schedules).
        share_prompts: neighbours in the batch with the same prompt form one unit. A unit is split if it exceeds the
            budget, or if a second copy of the prompt costs less than the split saves on the slowest rank.
        pipelined: micro-batches wait for each other, in addition to the DP ranks.

    Returns:
        The same number of micro-batches for every DP rank, with every sequence exactly once.

    Raises:
        UserError: a single sequence exceeds the budget.
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
    # The DP rank is the fastest index of the places, so units of similar cost go to different ranks.
    return tuple(tuple(tuple(sorted(places[m * dp + d])) for m in range(count)) for d in range(dp))


def _check_budget(tokens: InputTokens, token_budget: int) -> None:
    if tokens.whole and max(tokens.whole) > token_budget:
        worst = int(np.argmax(tokens.whole))
        raise UserError(
            f"sequence {worst} of the batch adds {tokens.whole[worst]} tokens to its micro-batch (without its last "
            f"sampled token, padded to a multiple of {tokens.multiple}), which holds at most trainer.token_budget = "
            f"{token_budget}", where="trainer.token_budget",
            fix=f"set trainer.token_budget to at least {tokens.whole[worst]}, or lower rollout.max_new_tokens")


def _groups(batch: PolicyBatch, share_prompts: bool) -> list[Unit]:
    """Group neighbours with the same prompt. Without sharing, every sequence is a unit of its own."""
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
    """Halve units until each fits. A unit of a single sequence always fits."""
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
    """Return the units of each place, or None if they do not fit."""
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
    """Halve the largest unit of the fullest party as long as this balances the parties better.

    `waiting` parties wait for each other. Place p belongs to party p modulo `waiting`.
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
    """Whether the half that moves contains more tokens than its extra copy of the prompt adds. Ranks on a CPU share its
    cores, so every copy slows all of them down."""
    if len(unit) == 1:
        return False
    half = _halves(unit)[1]
    prompt = tokens.whole[half[0]] - tokens.branch[half[0]]
    return tokens.unit(half) - prompt > prompt


def _loads(places: list[list[Unit]], tokens: InputTokens, waiting: int) -> list[int]:
    return [sum(tokens.unit(unit) for place in places[party::waiting] for unit in place) for party in range(waiting)]


def _padded(lengths_B: np.ndarray, multiple: int) -> np.ndarray:
    return -(-lengths_B // multiple) * multiple
