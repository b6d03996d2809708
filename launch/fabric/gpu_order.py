"""The GPU of its node for each engine rank, chosen so that weight traffic stays on its rail.

NIC r of every node is on rail r, and a GPU uses the NIC of its own index. A training shard is on the rails of its DP x
CP holders, and an engine rank that needs the shard should be on one of these rails. The engine itself is indifferent to
the order because of NVSwitch. The solution is exact: the fewest bytes that cross rails, then the first permutation in
lexicographic order.

    >>> engine_gpu_order(TrainingLayout(tp=4, cp=2, pp=4, dp=5), 8)
    (0, 4, 1, 5, 2, 6, 3, 7)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import gcd

from launch.plan.layouts import TrainingLayout

MOST_GPUS = 16
"""Maximum GPUs of a node for which the assignment is solved. Larger nodes get the natural order."""


def engine_gpu_order(training: TrainingLayout, rollout_tp: int, *, rollout_pp: int = 1, gpus_per_node: int = 8,
                     rails: int | None = None) -> tuple[int, ...]:
    """GPU index for each engine rank of a node: rank i of the node's engines, in the order of (replica, PP, TP), gets
    GPU `result[i]`.

    The result is one permutation of a node's GPUs if engines fit into a node (engine j gets entries j x size to
    (j + 1) x size), and otherwise one permutation after the other for the nodes of an engine.

    Args:
        rails: default one per GPU. With 1 (not rail-optimised) or more than `MOST_GPUS` GPUs, the order is natural.
    """
    if rollout_tp < 1 or rollout_pp < 1 or gpus_per_node < 1:
        raise ValueError(f"rollout TP {rollout_tp}, PP {rollout_pp} and {gpus_per_node} GPUs per node must be positive")
    period = gpus_per_node // gcd(training.tp, gpus_per_node)      # more holders are on the same rails
    return _order(training.tp, min(training.cp * training.dp, period), training.pp, rollout_tp, rollout_pp,
                  gpus_per_node, rails or gpus_per_node)


@lru_cache(maxsize=4096)
def _order(tp: int, holders: int, pp: int, engine_tp: int, engine_pp: int, gpus: int,
           rail_count: int) -> tuple[int, ...]:
    size = engine_tp * engine_pp
    spans = -(-size // gpus)
    twins = max(1, gpus // size)
    if rail_count == 1 or gpus > MOST_GPUS:
        return tuple(rank % gpus for rank in range(size if spans > 1 else size * twins))
    rails = holder_rails(tp, holders, pp, gpus, rail_count)
    order: list[int] = []
    for part in range(spans):
        ranks = range(part * gpus, min(size, (part + 1) * gpus)) if spans > 1 else range(size * twins)
        costs = [[_crossing(rank % size % engine_tp, rank // size, twins, engine_tp, tp, pp, rails,
                            gpu * rail_count // gpus)
                  for gpu in range(gpus)] for rank in ranks]
        order += assign(costs)
    return tuple(order)


def _crossing(rank: int, twin: int, twins: int, engine_tp: int, tp: int, pp: int, rails: list[list[frozenset[int]]],
              rail: int) -> int:
    """Bytes (in units of a stage / lcm) that this twin's share of an engine rank takes from shards with no holder on
    `rail`."""
    parts = engine_tp * twins
    unit = tp * parts // gcd(tp, parts)
    position = rank * twins + twin
    low, high = position * unit // parts, (position + 1) * unit // parts
    crossing = 0
    for shard in range(low * tp // unit, min(tp, -(-high * tp // unit))):
        shared = min(high, (shard + 1) * unit // tp) - max(low, shard * unit // tp)
        crossing += sum(max(0, shared) for stage in range(pp) if rail not in rails[stage][shard])
    return crossing


def holder_rails(tp: int, holders: int, pp: int, gpus: int,
                 rails: int) -> list[list[frozenset[int]]]:
    """`result[stage][shard]`: rails of the holders. Rank = tp + TP (i + holders x stage), placed node by node."""
    period = gpus // gcd(tp, gpus)
    return [[frozenset((shard + tp * (index + holders * stage)) % gpus * rails // gpus
                       for index in range(min(holders, period))) for shard in range(tp)] for stage in range(pp)]


def assign(costs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The column of each row, each used at most once, at the least total cost. Of several optima, the first in
    lexicographic order.

    Exact dynamic programme over sets of used columns, in 2^columns x columns steps.
    """
    columns = len(costs[0]) if costs else 0
    if len(costs) > columns or columns > MOST_GPUS:
        raise ValueError(f"{len(costs)} ranks on {columns} GPUs: at most {MOST_GPUS} GPUs, and no more ranks than GPUs")

    @cache
    def rest(row: int, used: int) -> int:
        if row == len(costs):
            return 0
        return min(cost + rest(row + 1, used | 1 << column) for column, cost in enumerate(costs[row])
                   if not used >> column & 1)

    chosen, used = [], 0
    for row, line in enumerate(costs):
        best = rest(row, used)
        column = next(each for each, cost in enumerate(line)
                      if not used >> each & 1 and cost + rest(row + 1, used | 1 << each) == best)
        chosen.append(column)
        used |= 1 << column
    return tuple(chosen)
