"""Time in which the engines of the rollout partition generate one step's responses.

Synchronous: all responses of a step start together, queue where an engine cannot hold them, and the step waits for
the longest. While requests queue, an engine runs full and its responses are of all ages (renewal theory); then it
drains: at position l of the remaining responses n S(l) still run, and TPOT falls with them. The integral

    T = prefill + queued tokens / B x TPOT(B) + integral of P(one of all N still runs at l) TPOT(n S(l)) dl

holds both ends: all tokens over the throughput when lengths are alike, E[longest of N] x TPOT(1) when they are not.

Asynchronous: responses are replaced as they end, so that every engine runs at the largest batch that it can hold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from launch.plan.book import line, part
from launch.planner.time.decode import Engine
from launch.planner.workload.lengths import Lengths

TAIL = 0.1
"""An engine is in its tail when fewer than this share of its batch still run."""


@dataclass(frozen=True)
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

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    @property
    def cache_tokens(self) -> float:
        """Mean tokens of cache that an active response holds."""
        return self.prompt_tokens / self.group + self.lengths.mean_residual

    @property
    def slots(self) -> float:
        """Responses that one engine can run at once: `max_num_seqs`, or as many as its cache holds at the mean context
        of an active response, a prompt shared by its G completions counted once."""
        return max(1.0, min(self.max_num_seqs, self.kv_tokens / self.cache_tokens))


@dataclass(eq=False)
class RolloutTime(ABC):
    """Generation of one step. Rates and counts are of all engines together."""

    PREFIX = "rollout"

    engine: Engine
    demand: Demand

    @line("responses an engine", "min(max_num_seqs, KV tokens / (prompt/G + E[l^2]/2E[l]))", key="rollout.slots")
    @part
    def held(self) -> float:
        return self.demand.slots

    @property
    @abstractmethod
    def tpot_s(self) -> float:
        """Seconds an output token, mean over the tokens."""

    @property
    @abstractmethod
    def in_flight(self) -> float:
        """Mean responses running."""

    @property
    @abstractmethod
    def total_s(self) -> float:
        """From the first request to the last token (synchronous); responses over their rate (asynchronous)."""

    @property
    @abstractmethod
    def tokens_per_s(self) -> float:
        """Output tokens."""

    @line("s", "cap x TPOT", key="rollout.longest_s")
    def latency_max_s(self) -> float:
        """Of a response that runs to the cap."""
        return self.demand.lengths.cap * self.tpot_s

    @property
    def latency_mean_s(self) -> float:
        """Of a response, from its start."""
        return self.demand.lengths.mean * self.tpot_s

    @property
    def slots(self) -> float:
        """Responses that the engines can run at once."""
        return self.demand.replicas * self.held

    @property
    def load(self) -> float:
        """in_flight / slots."""
        return self.in_flight / self.slots

    @property
    @abstractmethod
    def limit(self) -> str:
        """What the time is spent on: weights bandwidth, KV bandwidth, compute, host, all-reduce; KV capacity where the
        cache keeps requests waiting, tail where the last responses take most of it."""

    def _limit(self, batch: float, queues: bool) -> str:
        demand = self.demand
        if queues and demand.kv_tokens / demand.cache_tokens < demand.max_num_seqs:
            return "KV capacity"
        return self.engine.limit(batch, demand.lengths.active_context(demand.prompt_tokens))


class SynchronousRollout(RolloutTime):
    """All responses of a step start at once and the step ends with the longest."""

    @line("responses an engine", "prompts x G / replicas")
    @part
    def sequences(self) -> int:
        return math.ceil(self.demand.responses / self.demand.replicas)

    @part
    def batch(self) -> float:
        """Of an engine."""
        return min(self.sequences, self.held)

    @part
    def mixed(self) -> float:
        """0: all start at once and drain as they are; 1: the drain begins from a steady mixture of ages."""
        return min(1.0, (self.sequences - self.batch) / self.batch)

    @line("s", "prompts of an engine, each once for its G completions")
    @part
    def prefill_s(self) -> float:
        """Part of `total_s`."""
        return self.sequences / self.demand.group * self.engine.prefill_s(self.demand.prompt_tokens)

    @line("tokens an engine", "generated while requests queue: all less the drain")
    def queued_tokens(self) -> float:
        lengths, n, batch, mixed = self.demand.lengths, self.sequences, self.batch, self.mixed
        age = mixed * lengths.mean_residual
        return max(0.0, n * lengths.mean - batch * ((1 - mixed) * lengths.mean + age))

    @line("s", "queued tokens / B x TPOT(B, active context)")
    @part
    def steady_s(self) -> float:
        context = self.demand.lengths.active_context(self.demand.prompt_tokens)
        return self.queued_tokens / self.batch * self.engine.step_s(self.batch, context)

    @part
    def drain(self) -> tuple[float, float, float]:
        """Seconds of the drain, those with fewer than a tenth of the batch left, and responses x seconds."""
        engine_s, lengths, prompt = self.engine.step_s, self.demand.lengths, self.demand.prompt_tokens
        batch, mixed = self.batch, self.mixed
        age, others = mixed * lengths.mean_residual, self.demand.responses - self.sequences
        drain_s = tail_s = busy = 0.0
        for start, end, survival, residual in lengths.profile:
            running = (1 - mixed) * survival + mixed * residual
            if running <= 1e-12:        # far below one request, and 1 - (1 - running)^batch would round to 0
                break
            ended = (1 - running) ** batch
            here = 1 - ended            # P(one of this engine's still runs)
            anywhere = 1 - ended * (1 - running) ** others
            step_s = engine_s(batch * running / here, prompt + age + (start + end) / 2)
            seconds = (end - start) * anywhere * step_s
            drain_s += seconds
            busy += (end - start) * batch * running * step_s
            if running < TAIL:
                tail_s += seconds
        return drain_s, tail_s, busy

    @line("s", "integral of P(one of N runs at l) TPOT(n S(l), prompt + l) dl")
    def drain_s(self) -> float:
        return self.drain[0]

    @line("s", "prefill + steady + drain")
    @part
    def total_s(self) -> float:
        return self.prefill_s + self.steady_s + self.drain_s

    @line("s", "part of the drain with fewer than a tenth of the batch left")
    def tail_s(self) -> float:
        return self.drain[1]

    @line("s", "mean over the tokens of TPOT at the batch they ran in")
    @part
    def tpot_s(self) -> float:
        return (self.steady_s * self.batch + self.drain[2]) / (self.sequences * self.demand.lengths.mean)

    @line("responses", "mean running, all engines")
    def in_flight(self) -> float:
        tokens = self.demand.replicas * self.tpot_s * self.sequences * self.demand.lengths.mean
        return tokens / (self.steady_s + self.drain_s)

    @property
    def tokens_per_s(self) -> float:
        return self.demand.responses * self.demand.lengths.mean / self.total_s

    @property
    def limit(self) -> str:
        if self.tail_s > self.total_s / 2:
            return "tail"
        return self._limit(self.batch, self.sequences > self.held)


class AsynchronousRollout(RolloutTime):
    """Steady state: the engines are kept filled."""

    @line("responses an engine", "the slots: engines run full")
    @part
    def batch(self) -> float:
        return self.held

    @line("s", "TPOT(batch, active context) + prefill of others a token")
    @part
    def tpot_s(self) -> float:
        demand, lengths = self.demand, self.demand.lengths
        # what one more request's prefill adds to a token of the others
        wait_s = self.engine.prefill_s(demand.prompt_tokens) / demand.group / lengths.mean
        return self.engine.step_s(self.batch, lengths.active_context(demand.prompt_tokens)) + wait_s * self.batch

    @line("responses", "batch x replicas")
    def in_flight(self) -> float:
        return self.demand.replicas * self.batch

    @line("s", "responses x mean length x TPOT / in flight")
    @part
    def total_s(self) -> float:
        return self.demand.responses / self.rate

    @property
    def rate(self) -> float:
        """Responses a second."""
        return self.in_flight / (self.demand.lengths.mean * self.tpot_s)

    @property
    def tokens_per_s(self) -> float:
        return self.rate * self.demand.lengths.mean

    @property
    def limit(self) -> str:
        return self._limit(self.batch, self.held < self.demand.max_num_seqs)


def minimum_staleness(rollout: RolloutTime, step_s: float) -> int:
    """Fewest versions k that a strict first-in-first-out queue must allow: the longest response spans
    ceil(l_max TPOT / step) updates."""
    return math.ceil(rollout.latency_max_s / step_s - 1e-9)
