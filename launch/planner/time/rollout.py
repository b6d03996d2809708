"""Time in which the engines of the rollout partition generate one step's responses.

Synchronous: all responses of a step start together, queue where an engine cannot hold them, and the step waits for
the longest. While requests queue, an engine runs full and its responses are of all ages (renewal theory); then it
drains: at position l of the remaining responses n S(l) still run, and TPOT falls with them. The integral

    T = prefill + queued tokens / B x TPOT(B) + integral of P(one of all N still runs at l) TPOT(n S(l)) dl

holds both ends: all tokens over the throughput when lengths are alike, E[longest of N] x TPOT(1) when they are not.

Asynchronous: responses are replaced as they end, so that every engine runs at the batch whose rate is what the
trainer takes (Little: in flight = rate x latency), or at the largest it can hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.plan.book import NO_BOOK, Book
from launch.planner.time.decode import Engine
from launch.planner.workload.lengths import Lengths

TAIL = 0.1
"""An engine is in its tail when fewer than this share of its batch still run."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one step asks of the rollout partition, and what an engine of it can hold."""

    prompts: int
    group: int
    """G: completions of a prompt, which share its prefill and its cache."""
    prompt_tokens: float
    lengths: Lengths
    replicas: int
    max_num_seqs: int
    """Of one engine."""
    kv_tokens: float
    """Cache of one engine, in tokens (`memory`)."""
    kv_key: str = "memory.rollout.kv_tokens"
    """Where the book has it."""

    @property
    def responses(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """Generation of one step. Rates and counts are of all engines together."""

    total_s: float
    """From the first request to the last token (synchronous); responses over their rate (asynchronous)."""
    prefill_s: float
    """Part of `total_s`: prompts, each once for its G completions."""
    tail_s: float
    """Part of `total_s` in which fewer than a tenth of the batch still run; 0 when asynchronous."""
    tpot_s: float
    """Seconds an output token, mean over the tokens."""
    tokens_per_s: float
    """Output tokens."""
    in_flight: float
    """Mean responses running."""
    slots: float
    """Responses that the engines can run at once."""
    load: float
    """in_flight / slots."""
    latency_mean_s: float
    """Of a response, from its start."""
    latency_max_s: float
    """Of a response that runs to the cap."""
    limit: str
    """What the time is spent on: weights bandwidth, KV bandwidth, compute, host, all-reduce; KV capacity where the
    cache keeps requests waiting, tail where the last responses take most of it."""


def slots(demand: Demand) -> float:
    """Responses that one engine can run at once: `max_num_seqs`, or as many as its cache holds at the mean context of
    an active response, a prompt shared by its G completions counted once."""
    return max(1.0, min(demand.max_num_seqs, demand.kv_tokens / _cache_tokens(demand)))


def synchronous(engine: Engine, demand: Demand, *, book: Book = NO_BOOK) -> RolloutTime:
    """All responses of a step start at once and the step ends with the longest."""
    lengths, n = demand.lengths, math.ceil(demand.responses / demand.replicas)
    held = slots(demand)
    batch = min(n, held)
    # 0: all start at once and drain as they are; 1: the drain begins from a steady mixture of ages
    mixed = min(1.0, (n - batch) / batch)
    age = mixed * lengths.mean_residual
    prefill_s = n / demand.group * engine.prefill_s(demand.prompt_tokens)
    queued = max(0.0, n * lengths.mean - batch * ((1 - mixed) * lengths.mean + age))
    steady_s = queued / batch * engine.step_s(batch, lengths.active_context(demand.prompt_tokens))
    drain_s = tail_s = busy = 0.0
    others = demand.responses - n
    for start, end, survival, residual in lengths.profile:
        running = (1 - mixed) * survival + mixed * residual
        if running <= 1e-12:        # far below one request, and 1 - (1 - running)^batch would round to 0
            break
        ended = (1 - running) ** batch
        here = 1 - ended            # P(one of this engine's still runs)
        anywhere = 1 - ended * (1 - running) ** others
        step_s = engine.step_s(batch * running / here, demand.prompt_tokens + age + (start + end) / 2)
        seconds = (end - start) * anywhere * step_s
        drain_s += seconds
        busy += (end - start) * batch * running * step_s
        if running < TAIL:
            tail_s += seconds
    total_s = prefill_s + steady_s + drain_s
    tpot_s = (steady_s * batch + busy) / (n * lengths.mean)
    limit = _limit(engine, demand, batch, n > held)
    if tail_s > total_s / 2:
        limit = "tail"
    in_flight = demand.replicas * tpot_s * n * lengths.mean / (steady_s + drain_s)
    if book.keeps:
        _write_sync(demand, book, n, held, prefill_s, queued, steady_s, drain_s, total_s, tpot_s, tail_s, in_flight)
    return RolloutTime(
        total_s=total_s, prefill_s=prefill_s, tail_s=tail_s, tpot_s=tpot_s,
        tokens_per_s=demand.responses * lengths.mean / total_s, in_flight=in_flight, slots=demand.replicas * held,
        load=in_flight / (demand.replicas * held), latency_mean_s=lengths.mean * tpot_s,
        latency_max_s=lengths.cap * tpot_s, limit=limit)


def asynchronous(engine: Engine, demand: Demand, *, step_s: float | None = None, book: Book = NO_BOOK) -> RolloutTime:
    """Steady state: the engines are kept filled.

    Args:
        step_s: time in which the trainer takes one step's responses; None, or less than the engines need: they run
            full, and `load` is 1.
    """
    lengths = demand.lengths
    context = lengths.active_context(demand.prompt_tokens)
    prompt_s = engine.prefill_s(demand.prompt_tokens) / demand.group
    wait_s = prompt_s / lengths.mean        # what one more request's prefill adds to a token of the others
    held = slots(demand)
    wanted = demand.responses / demand.replicas / step_s if step_s else math.inf

    def tpot_at(batch: float) -> float:
        return engine.step_s(batch, context) + wait_s * batch

    batch = held
    if wanted * lengths.mean * tpot_at(held) < held:
        low, high = 0.0, held
        for _ in range(40):
            batch = (low + high) / 2
            low, high = (batch, high) if batch < wanted * lengths.mean * tpot_at(batch) else (low, batch)
        batch = high
    tpot_s = tpot_at(batch)
    rate = demand.replicas * batch / (lengths.mean * tpot_s)
    limit = _limit(engine, demand, batch, batch >= held and held < demand.max_num_seqs)
    if book.keeps:
        _write_async(demand, book, held, batch, tpot_s, demand.responses / rate, step_s is not None)
    return RolloutTime(
        total_s=demand.responses / rate, prefill_s=demand.prompts / demand.replicas * prompt_s * demand.group,
        tail_s=0.0, tpot_s=tpot_s, tokens_per_s=rate * lengths.mean, in_flight=demand.replicas * batch,
        slots=demand.replicas * held, load=batch / held, latency_mean_s=lengths.mean * tpot_s,
        latency_max_s=lengths.cap * tpot_s, limit=limit)


def needed_in_flight(engine: Engine, demand: Demand, step_s: float) -> float:
    """Responses in flight, of all engines, at which one step's worth ends every `step_s` (Little), whatever the
    engines can hold; infinite where no batch reaches the rate."""
    roomy = Demand(demand.prompts, demand.group, demand.prompt_tokens, demand.lengths, demand.replicas, 1 << 20, 1e18)
    needed = asynchronous(engine, roomy, step_s=step_s)
    return needed.in_flight if needed.load < 1 else math.inf


def minimum_staleness(rollout: RolloutTime, step_s: float) -> int:
    """Fewest versions k that a strict first-in-first-out queue must allow: the longest response spans
    ceil(l_max TPOT / step) updates."""
    return math.ceil(rollout.latency_max_s / step_s - 1e-9)


def _cache_tokens(demand: Demand) -> float:
    """Mean tokens of cache that an active response holds."""
    return demand.prompt_tokens / demand.group + demand.lengths.mean_residual


def _limit(engine: Engine, demand: Demand, batch: float, queues: bool) -> str:
    if queues and demand.kv_tokens / _cache_tokens(demand) < demand.max_num_seqs:
        return "KV capacity"
    return engine.limit(batch, demand.lengths.active_context(demand.prompt_tokens))


_ENGINE = tuple(f"rollout.engine.{name}" for name in
                ("fixed_s", "weights_s", "experts_s", "picked", "compute_s", "kv_s", "sequence_s", "reduce_s",
                 "reduce_token_s"))
_LENGTHS = ("workload.response_mean", "workload.response_second_moment", "workload.response_cap")
_PREFILL = ("rollout.engine.prefill_token_s", "rollout.engine.prefill_pair_s", "rollout.pp", "workload.prompt_tokens")


def _write_slots(demand: Demand, book: Book, held: float) -> None:
    book.computed("rollout.slots", held, "responses an engine",
                  "min(max_num_seqs, KV tokens / (prompt/G + E[l^2]/2E[l]))",
                  ("rollout.max_num_seqs", demand.kv_key, "workload.prompt_tokens", "workload.group",
                   *_LENGTHS))


def _write_sync(demand: Demand, book: Book, n: int, held: float, prefill_s: float, queued: float, steady_s: float,
                drain_s: float, total_s: float, tpot_s: float, tail_s: float, in_flight: float) -> None:
    _write_slots(demand, book, held)
    book.computed("rollout.sequences", n, "responses an engine", "prompts x G / replicas",
                  ("workload.prompts", "workload.group", "rollout.replicas"))
    book.computed("rollout.prefill_s", prefill_s, "s", "prompts of an engine, each once for its G completions",
                  ("rollout.sequences", "workload.group", *_PREFILL))
    batch = ("rollout.sequences", "rollout.slots")
    book.computed("rollout.queued_tokens", queued, "tokens an engine",
                  "generated while requests queue: all less the drain", (*batch, *_LENGTHS))
    book.computed("rollout.steady_s", steady_s, "s", "queued tokens / B x TPOT(B, active context)",
                  ("rollout.queued_tokens", *batch, "rollout.pp", "workload.prompt_tokens", *_LENGTHS, *_ENGINE))
    drain = (*batch, "workload.prompts", "workload.group", "rollout.pp", "workload.prompt_tokens", *_LENGTHS,
             *_ENGINE)
    book.computed("rollout.drain_s", drain_s, "s", "integral of P(one of N runs at l) TPOT(n S(l), prompt + l) dl",
                  drain)
    book.computed("rollout.total_s", total_s, "s", "prefill + steady + drain",
                  ("rollout.prefill_s", "rollout.steady_s", "rollout.drain_s"))
    book.computed("rollout.tail_s", tail_s, "s", "part of the drain with fewer than a tenth of the batch left", drain)
    book.computed("rollout.tpot_s", tpot_s, "s", "mean over the tokens of TPOT at the batch they ran in",
                  dict.fromkeys((*drain, "rollout.steady_s")))
    book.computed("rollout.in_flight", in_flight, "responses", "mean running, all engines",
                  ("rollout.tpot_s", "rollout.steady_s", "rollout.drain_s", "rollout.sequences",
                   "workload.response_mean", "rollout.replicas"))


def _write_async(demand: Demand, book: Book, held: float, batch: float, tpot_s: float, total_s: float,
                 paced: bool) -> None:
    _write_slots(demand, book, held)
    token = ("workload.group", "workload.prompt_tokens", "rollout.pp", *_LENGTHS, *_ENGINE, *_PREFILL)
    inputs = ("rollout.slots",)
    if paced:
        inputs += ("workload.prompts", "rollout.replicas", "step.total_s", *token)
    book.computed("rollout.batch", batch, "responses an engine",
                  "smallest whose rate is what the trainer takes (Little), at most the slots" if paced else
                  "the slots: engines run full", dict.fromkeys(inputs))
    book.computed("rollout.tpot_s", tpot_s, "s", "TPOT(batch, active context) + prefill of others a token",
                  dict.fromkeys(("rollout.batch", *token)))
    book.computed("rollout.in_flight", demand.replicas * batch, "responses", "batch x replicas",
                  ("rollout.batch", "rollout.replicas"))
    book.computed("rollout.total_s", total_s, "s", "responses x mean length x TPOT / in flight",
                  ("workload.prompts", "workload.group", "workload.response_mean", "rollout.tpot_s",
                   "rollout.in_flight"))
