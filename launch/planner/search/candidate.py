"""Both partitions at once: what a pair of layouts costs, and what the whole step then is.

A *unit* is what the search divides between the partitions: a node, or a GPU where the cluster has one node only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from launch.fabric.choose import SyncPrediction, predict
from launch.fabric.estimate import swap_seconds
from launch.plan.book import NO_BOOK, Book
from launch.plan.layouts import RolloutLayout, TrainingLayout, TrainingWork
from launch.planner.memory.host import host_bytes
from launch.planner.memory.rollout import ColocatedMemory, RolloutMemory, colocated_memory, rollout_memory
from launch.planner.memory.training import StageMemory, TrainingMemory, training_memory
from launch.planner.search.problem import Mode, Problem
from launch.planner.time import step as rl_step
from launch.planner.time.decode import engine_of
from launch.planner.time.handover import handover_seconds
from launch.planner.time.rollout import Demand, RolloutTime, asynchronous, minimum_staleness, synchronous
from launch.planner.time.training import TrainingTime, logprob_time, training_time
from launch.planner.workload.lengths import Lengths
from launch.planner.workload.workload import training_work

TRAINER_BUCKETS, ENGINE_BUCKETS = 2, 6
"""Buckets that stay allocated for the weight sync: two of each transfer that a GPU takes part in at once, of which a
receiver that forwards in both halves of a tree has three."""
FEWEST_SEQUENCES, MOST_SEQUENCES = 16, 1024
"""Of an engine at once, where the number is searched."""
SYNC_TICK_S = 1e-3
"""A predicted sync over the network is no finer than this: plans that differ by less are equal in it, so that microseconds
decide nothing."""


@dataclass(frozen=True)
class TrainingOption:
    """A layout of the training partition, with what it costs."""

    units: int
    layout: TrainingLayout
    work: TrainingWork
    memory: TrainingMemory
    time: TrainingTime
    train_s: float
    logprob_s: float
    reference_s: float

    @property
    def seconds(self) -> float:
        """Of one GRPO step: all its optimizer steps and log-prob passes."""
        return self.train_s + self.logprob_s + self.reference_s

    @property
    def worst(self) -> StageMemory:
        return self.memory.stages[self.memory.worst]


@dataclass(frozen=True)
class RolloutOption:
    """Engines of one layout, with what a step takes them."""

    units: int
    layout: RolloutLayout
    memory: RolloutMemory
    time: RolloutTime
    seconds: float
    """Of one GRPO step: until the longest completion ends, or, asynchronous, the completions over their rate."""
    pace_s: float
    """The step may not be shorter: the longest completion over the versions that it may span; 0 without a limit."""
    swap_s: float
    """For how long the engines stop for a sync that is received into a second copy of the weights."""


@dataclass(frozen=True)
class Candidate:
    """A whole plan, in numbers."""

    mode: Mode
    training: TrainingOption
    rollout: RolloutOption
    sync: SyncPrediction | None
    """None where nothing travels between GPUs."""
    sync_s: float
    colocated: ColocatedMemory | None
    problem: Problem

    @cached_property
    def step_s(self) -> float:
        return step_seconds(self.problem, self.rollout.seconds, self.training.seconds, self.sync_s, self.rollout.pace_s,
                            self.rollout.swap_s)

    @property
    def waits(self) -> bool:
        """Whether the limit on the staleness sets the step."""
        return self.rollout.pace_s >= self.step_s

    @property
    def prompts_per_hour(self) -> float:
        return 3600 * self.problem.workload.prompts / self.step_s

    @property
    def rollout_busy(self) -> float:
        """Share of the step in which the engines are asked for completions: the rest they wait for the trainer."""
        return min(1.0, self.rollout.seconds / self.step_s) if self.problem.asynchronous else 1.0

    @property
    def rollout_load(self) -> float:
        """Completions in flight over what the engines hold, at the step's real length."""
        return self.rollout.time.load * self.rollout_busy

    @property
    def units(self) -> int:
        """In use."""
        if self.mode == "disaggregated":
            return self.training.units + self.rollout.units
        return self.training.units

    @property
    def pauses(self) -> dict[str, float]:
        """Staging -> seconds for which the engines serve nothing at a sync. Adapters alone and weights that the engine
        quantises are never received into a second copy."""
        shadow = not self.problem.lora_rank and self.rollout.layout.weight_precision != "fp8"
        return {"in_place": self.sync_s} | ({"shadow": self.rollout.swap_s} if shadow else {})

    @property
    def staleness(self) -> int:
        """Versions: ceil(longest completion / step), 0 when synchronous."""
        if not self.problem.asynchronous:
            return 0
        return max(1, minimum_staleness(self.rollout.time, self.step_s))


def shares(problem: Problem) -> tuple[float, ...]:
    """Of a GPU, that an engine beside a trainer may get: what the configuration allows, then in steps of 0.05."""
    most = problem.pins.memory_utilization
    return (most, *(step / 20 for step in range(19, 0, -1) if step / 20 < most))


def share_left(problem: Problem, mode: Mode, memory: TrainingMemory) -> float:
    """The largest of `shares` that fits beside a trainer that sleeps: its context and (hybrid) its resident state stay;
    0 if none does."""
    resident = max(stage.resident for stage in memory.stages) if mode == "hybrid" else 0
    left = memory.limit - memory.stages[0].components["context"] - resident
    usable = problem.cluster.gpu.usable_bytes
    return next((share for share in shares(problem) if int(share * usable) <= left), 0.0)


def step_seconds(problem: Problem, rollout_s: float, training_s: float, sync_s: float, pace_s: float, swap_s: float, *,
                 passes: Sequence[str] = (), book: Book = NO_BOOK) -> float:
    """Of a whole step; see `rl_step.step_seconds`. `pace_s`, `swap_s`: see `RolloutOption`."""
    mode: rl_step.StepMode = "fully_async" if problem.asynchronous else "synchronous"
    phases = rl_step.Phases(rollout_s=rollout_s, train_s=training_s, refit_s=sync_s,
                            swap_s=swap_s if problem.shadow else None)
    floor = ("rollout.longest_s", "algorithm.max_staleness") if pace_s else ()
    return rl_step.step_seconds(mode, phases, problem.coefficients.rl, passes=passes, at_least_s=pace_s,
                                at_least_keys=floor, book=book)


def training_option(problem: Problem, layout: TrainingLayout, units: int, book: Book = NO_BOOK) -> TrainingOption:
    """A layout (with its DP) on `units` units, whether it fits or not."""
    work = training_work(problem.workload, layout, problem.token_budget, book)
    memory = training_memory_of(problem, layout, work, book)
    return TrainingOption(units, layout, work, memory, *_training_times(problem, layout, work, book))


def training_seconds(problem: Problem, layout: TrainingLayout) -> float:
    """`TrainingOption.seconds` of a layout, without its memory: what the search compares."""
    work = training_work(problem.workload, layout, problem.token_budget)
    _, train_s, logprob_s, reference_s = _training_times(problem, layout, work, NO_BOOK)
    return train_s + logprob_s + reference_s


def _training_times(problem: Problem, layout: TrainingLayout, work: TrainingWork,
                    book: Book) -> tuple[TrainingTime, float, float, float]:
    """(one optimizer step, seconds of all of a GRPO step, of the log-prob pass, of the reference's)."""
    workload, coefficients = problem.workload, problem.coefficients
    time = training_time(problem.shape, layout, work, problem.cluster, coefficients.training,
                         collectives=coefficients.collectives, lora_rank=problem.lora_rank, book=book)
    forward_s = 0.0
    if workload.logprob_pass or workload.reference or book.keeps:
        forward_s = logprob_time(problem.shape, layout, work, problem.cluster, coefficients.training,
                                 collectives=coefficients.collectives, book=book).total_s
    uneven = rl_step.write_imbalance(_imbalance(workload.lengths, workload.prompt_tokens, work.sequences, layout.dp), book)
    passes = rl_step.training_passes(time.total_s, forward_s, workload.updates, uneven=uneven,
                                     mixture=bool(problem.shape.experts), coefficients=coefficients.rl, book=book)
    logprob_s = reference_s = 0.0
    if workload.logprob_pass:
        logprob_s = book.computed("phase.logprob_s", passes.pass_s, "s", "one pass", ("phase.pass_s",))
    if workload.reference:
        reference_s = book.computed("phase.reference_s", passes.pass_s, "s", "one pass", ("phase.pass_s",))
    return time, passes.train_s, logprob_s, reference_s


@lru_cache(maxsize=4096)
def _imbalance(lengths: Lengths, prompt_tokens: float, sequences: int, dp: int) -> float:
    return rl_step.imbalance(lengths, prompt_tokens, sequences, dp)


def training_memory_of(problem: Problem, layout: TrainingLayout, work: TrainingWork,
                       book: Book = NO_BOOK) -> TrainingMemory:
    workload = problem.workload
    reference = ("offloaded" if workload.reference_offload else "device") if workload.reference else "none"
    return training_memory(problem.shape, layout, problem.token_budget, problem.cluster.gpu,
                           problem.coefficients.memory, micro_batches=work.micro_batches, reference=reference,
                           sync_bucket_bytes=TRAINER_BUCKETS * problem.bucket_bytes, lora_rank=problem.lora_rank,
                           tokens_key="trainer.token_budget", book=book)


def rollout_option(problem: Problem, layout: RolloutLayout, units: int, book: Book = NO_BOOK, *,
                   must_fit: bool = True) -> RolloutOption | None:
    """A layout (with its replicas) on `units` units; None where an engine's cache cannot hold one sequence, unless that
    is not asked."""
    workload, coefficients = problem.workload, problem.coefficients
    memory = engine_memory(problem, layout, book)
    if memory.verdict == "no" and must_fit:
        return None
    kv_tokens, kv_key = _cache(problem, memory, book)
    engine = engine_of(problem.shape, layout, problem.cluster, coefficients.rollout, book=book)
    demand = Demand(prompts=workload.prompts, group=workload.group, prompt_tokens=workload.prompt_tokens,
                    lengths=workload.lengths, replicas=layout.replicas, max_num_seqs=layout.max_num_seqs,
                    kv_tokens=kv_tokens, kv_key=kv_key)
    time = asynchronous(engine, demand, book=book) if problem.asynchronous else synchronous(engine, demand, book=book)
    seconds = rl_step.rollout_seconds(time.total_s, workload.sequences, coefficients.rl, book=book)
    book.computed("rollout.longest_s", time.latency_max_s, "s", "cap x TPOT", ("workload.response_cap", "rollout.tpot_s"))
    limit = problem.max_staleness if problem.asynchronous else None
    return RolloutOption(units, layout, memory, time, seconds, time.latency_max_s / limit if limit else 0.0,
                         swap_seconds(memory.components["weights"], coefficients.sync))


def _cache(problem: Problem, memory: RolloutMemory, book: Book) -> tuple[int, str]:
    """(tokens of an engine's cache, their key in the book)."""
    if problem.kv_tokens is not None:
        return problem.kv_tokens, "rollout.kv_tokens"
    longest = problem.workload.longest
    if memory.kv_tokens >= longest:
        return memory.kv_tokens, "memory.rollout.kv_tokens"
    return book.computed("rollout.kv_tokens", longest, "tokens", "at least one sequence of the longest",
                         ("memory.rollout.kv_tokens", "work.longest")), "rollout.kv_tokens"


def engine_memory(problem: Problem, layout: RolloutLayout, book: Book = NO_BOOK) -> RolloutMemory:
    return rollout_memory(problem.shape, layout, problem.cluster.gpu, problem.coefficients.memory,
                          max_tokens=problem.workload.longest, sync_bytes=ENGINE_BUCKETS * problem.bucket_bytes,
                          shadow=problem.shadow, book=book,
                          requantised=layout.weight_precision == "fp8" and not problem.lora_rank)


def sequence_limits(problem: Problem, replicas: int) -> tuple[int, ...]:
    """Values of an engine's `max_num_seqs` to try: the pinned one; else powers of two, synchronous up to what a step asks of
    an engine (asynchronous, completions of several steps are in flight)."""
    if problem.pins.max_num_seqs:
        return (problem.pins.max_num_seqs,)
    asked = MOST_SEQUENCES if problem.asynchronous else -(-problem.workload.sequences // replicas)
    return tuple(limit for limit in (FEWEST_SEQUENCES << power for power in range(7))
                 if limit == FEWEST_SEQUENCES or limit < 2 * asked)


def candidate(problem: Problem, mode: Mode, training: TrainingOption, rollout: RolloutOption,
              book: Book = NO_BOOK) -> Candidate:
    """A pair of options as one plan."""
    coefficients = problem.coefficients
    if mode == "disaggregated":
        sync = predict(problem.shape, training.layout, rollout.layout, problem.cluster, coefficients.sync,
                       route=problem.route, book=book, **sync_arguments(problem, training.layout, rollout.layout))
        sync_s, colocated = in_ticks(problem, sync.seconds), None
        rates = (f"{coefficients.sync.PREFIX}.{name}" for name in ("pause_s", "barrier_s", "copy_rate", "digest_rate"))
        book.computed("sync.swap_s", rollout.swap_s, "s",
                      "pause + barriers/3 + weights/copy rate + weights/digest rate", ("memory.rollout.weights", *rates))
    else:
        sync = None
        sync_s = handover_seconds(mode, problem.shape, training.layout, rollout.layout, problem.cluster, coefficients,
                                  lora_rank=problem.lora_rank, book=book)
        colocated = colocated_memory(training.memory, rollout.memory, problem.cluster.gpu, coefficients.memory,
                                     trainer_offloaded=mode == "colocated", book=book)
    whole = ", in whole milliseconds" if sync_s != (sync.seconds if sync else sync_s) else ""
    book.computed("phase.sync_s", sync_s, "s", f"the chosen route{whole}" if sync else "hand-over inside the GPUs",
                  ("sync.seconds",) if sync else ("sync.in_place_s",))
    if book.keeps:
        host_bytes(problem.shape, problem.workload, problem.cluster.gpus_per_node, training.layout, training.memory,
                   mode == "colocated", book)
    found = Candidate(mode, training, rollout, sync, sync_s, colocated, problem)
    passes = [key for key in ("phase.logprob_s", "phase.reference_s") if key in book]
    step_seconds(problem, rollout.seconds, training.seconds, sync_s, rollout.pace_s, rollout.swap_s, passes=passes,
                 book=book)
    book.computed("step.prompts_per_hour", found.prompts_per_hour, "prompts/h", "3600 x prompts / step",
                  ("workload.prompts", "step.total_s"))
    return found


def in_ticks(problem: Problem, seconds: float) -> float:
    """Rounded up to `SYNC_TICK_S` between nodes; as it is on one machine."""
    if len(problem.cluster.nodes) == 1:
        return seconds
    return math.ceil(seconds / SYNC_TICK_S - 1e-9) * SYNC_TICK_S


def sync_arguments(problem: Problem, training: TrainingLayout, rollout: RolloutLayout) -> dict[str, Any]:
    """What `launch.fabric` must know of a sync beside the layouts."""
    return {"weight_bytes": 4 if training.precision == "fp32" else 2, "lora_rank": problem.lora_rank,
            "rollout_precision": rollout.weight_precision, "bucket_bytes": problem.bucket_bytes}
