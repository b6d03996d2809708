"""The steady state of a plan on a time axis: the phases of consecutive steps, and the micro-batches of one update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from launch.plan.forecast import Forecast

Partition = Literal["training", "rollout"]
PARTITIONS: tuple[Partition, ...] = ("training", "rollout")


@dataclass(frozen=True)
class PhaseSpan:
    """Something with a duration. Spans of one (partition, row) never overlap."""

    name: str
    partition: Partition
    row: int
    start: float
    """Seconds."""
    seconds: float
    step: int


def phases(forecast: Forecast, steps: int) -> list[PhaseSpan]:
    """Phases of `steps` consecutive steps; step k begins k step times after the first. Phases that overlap within a
    partition go to separate rows. Nodes that both roles share are one partition, `training`."""
    shared = forecast.split.mode != "disaggregated"
    found: list[PhaseSpan] = []
    for partition in PARTITIONS[:1] if shared else PARTITIONS:
        ends: list[float] = []
        slots = sorted((index * forecast.step_s + phase.starts, number, index, phase)
                       for index in range(steps) for number, phase in enumerate(forecast.phases)
                       if shared or phase.partition in (partition, "both"))
        for start, _, index, phase in slots:
            row = next((row for row, end in enumerate(ends) if end <= start + 1e-9), len(ends))
            if row == len(ends):
                ends.append(0.0)
            start = max(start, ends[row])
            ends[row] = start + phase.seconds
            found.append(PhaseSpan(phase.name, partition, row, start, phase.seconds, index))
    return found


@dataclass(frozen=True)
class MicroBatch:
    """A forward or backward pass of a micro-batch (and model chunk) on a stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int
    start: float
    seconds: float


def one_f_one_b(stages: int, chunks: int, micro_batches: int, seconds: float) -> list[list[MicroBatch]]:
    """1F1B, interleaved for `chunks` > 1 (Narayanan et al., arXiv 2104.04473), scaled to take `seconds` in total.

    A backward pass takes twice as long as a forward one. The interleaved schedule needs a multiple of the number of
    stages as micro-batches, as in Megatron. Otherwise the chunks run as one.

    Returns:
        The passes of each stage, in order.
    """
    if chunks > 1 and micro_batches % stages:
        chunks = 1
    orders = [_order(stage, stages, chunks, micro_batches) for stage in range(stages)]
    done: dict[tuple[str, int, int, int], float] = {}
    free, position = [0.0] * stages, [0] * stages
    passes: list[list[MicroBatch]] = [[] for _ in range(stages)]
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        before = list(position)
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                kind, micro_batch, chunk = order[position[stage]]
                needed = _needed(kind, micro_batch, chunk, stage, stages, chunks)
                if needed is not None and needed not in done:
                    break
                start = max(free[stage], done[needed] if needed else 0.0)
                length = (1.0 if kind == "forward" else 2.0) / chunks
                free[stage] = done[kind, micro_batch, chunk, stage] = start + length
                passes[stage].append(MicroBatch(kind, micro_batch, chunk, start, length))
                position[stage] += 1
        if position == before:
            raise AssertionError(f"{stages} stages, {chunks} chunks, {micro_batches} micro-batches: it stalls")
    scale = seconds / max(free)
    return [[MicroBatch(each.kind, each.micro_batch, each.chunk, each.start * scale, each.seconds * scale)
             for each in stage] for stage in passes]


Pass = tuple[Literal["forward", "backward"], int, int]


def _order(stage: int, stages: int, chunks: int, micro_batches: int) -> Sequence[Pass]:
    """Passes of a stage in Megatron's order: warm-up forwards, then forward and backward alternating, then the rest."""
    total = micro_batches * chunks
    if chunks == 1:
        warmup = min(total, stages - stage - 1)
        forwards = backwards = [(index, 0) for index in range(total)]
    else:
        warmup = min(total, 2 * (stages - stage - 1) + (chunks - 1) * stages)
        groups = range(0, micro_batches, stages)
        forwards = [(first + index, chunk) for first in groups for chunk in range(chunks) for index in range(stages)]
        backwards = [(micro_batch, chunks - 1 - chunk) for micro_batch, chunk in forwards]
    order: list[Pass] = [("forward", *each) for each in forwards[:warmup]]
    for index in range(total - warmup):
        order += [("forward", *forwards[warmup + index]), ("backward", *backwards[index])]
    return order + [("backward", *each) for each in backwards[total - warmup:]]


def _needed(kind: str, micro_batch: int, chunk: int, stage: int, stages: int,
            chunks: int) -> tuple[str, int, int, int] | None:
    """The pass that must end first; None for the very first pass."""
    if kind == "forward":
        if stage > 0:
            return "forward", micro_batch, chunk, stage - 1
        return ("forward", micro_batch, chunk - 1, stages - 1) if chunk > 0 else None
    if stage < stages - 1:
        return "backward", micro_batch, chunk, stage + 1
    return ("backward", micro_batch, chunk + 1, 0) if chunk < chunks - 1 else ("forward", micro_batch, chunk, stage)
