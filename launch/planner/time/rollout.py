"""Time in which the engines of the rollout partition generate the responses of one step.

Synchronous: all responses of a step start together, and the step waits for the longest. Responses that an engine cannot
hold are queued. While requests queue, an engine runs full, and its responses have all ages (renewal theory). Then the
engine drains: at position l, n S(l) responses still run, and TPOT falls with their number. The integral

    T = prefill + queued tokens / B x TPOT(B) + integral of P(one of all N still runs at l) TPOT(n S(l)) dl

covers both extremes: all tokens divided by the throughput if lengths are equal, E[longest of N] x TPOT(1) if they
differ strongly.

Asynchronous: a new response starts whenever one ends, so every engine runs at the largest batch that it can hold.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from launch.plan.book import line, part
from launch.plan.plan import PARTS
from launch.planner.time.decode import Engine
from launch.planner.workload.lengths import Lengths

TAIL = 0.1
"""An engine is in its tail if less than this share of its batch still runs."""


@dataclass(frozen=True)
class Demand:
    """The work of the rollout partition in one step, and the capacity of an engine."""

    prompts: int
    group: int
    """G: completions per prompt. They share its prefill and its cache."""
    prompt_tokens: float
    lengths: Lengths
    replicas: int
    max_num_seqs: int
    """Maximum number of sequences that one engine runs at once."""
    kv_tokens: float
    """Tokens in the KV cache of one engine (`launch.planner.memory`)."""

    @property
    def responses(self) -> int:
        return self.prompts * self.group

    @property
    def cache_tokens(self) -> float:
        """Mean tokens of cache that an active response uses."""
        return self.prompt_tokens / self.group + self.lengths.mean_residual

    @property
    def slots(self) -> float:
        """Responses that one engine can run at once: `max_num_seqs`, or as many as its cache holds at the mean context
        of an active response. A prompt counts once for its G completions."""
        return max(1.0, min(self.max_num_seqs, self.kv_tokens / self.cache_tokens))


@dataclass(eq=False)
class RolloutTime(ABC):
    """Generation of one step. Rates and counts are those of all engines together."""

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
        """Seconds per output token, mean over the tokens."""

    @property
    @abstractmethod
    def in_flight(self) -> float:
        """Mean number of running responses."""

    @property
    @abstractmethod
    def total_s(self) -> float:
        """Seconds of generation. Synchronous: from the first request to the last token. Asynchronous: responses divided
        by their rate."""

    @property
    @abstractmethod
    def tokens_per_s(self) -> float:
        """Output tokens per second."""

    @property
    def completions(self) -> tuple[float, ...]:
        """Shares of `total_s` after which 1/n, 2/n, ... of the step's tokens are in complete groups (n = PARTS); the
        last one is 1. Empty if groups of several steps are generated at a time."""
        return ()

    @line("s", "cap x TPOT", key="rollout.longest_s")
    def latency_max_s(self) -> float:
        """Seconds of a response that runs to the cap."""
        return self.demand.lengths.cap * self.tpot_s

    @property
    def latency_mean_s(self) -> float:
        """Mean seconds of a response, from its start."""
        return self.demand.lengths.mean * self.tpot_s

    @property
    def slots(self) -> float:
        """Responses that the engines can run at once."""
        return self.demand.replicas * self.held

    @property
    def load(self) -> float:
        """`in_flight` / `slots`."""
        return self.in_flight / self.slots

    @property
    @abstractmethod
    def limit(self) -> str:
        """What limits the rollout: weights bandwidth, KV bandwidth, compute, host or all-reduce; KV capacity if
        requests wait for the cache; tail if the last responses take most of the time."""

    def _limit(self, batch: float, queues: bool) -> str:
        demand = self.demand
        if queues and demand.kv_tokens / demand.cache_tokens < demand.max_num_seqs:
            return "KV capacity"
        return self.engine.limit(batch, demand.lengths.active_context(demand.prompt_tokens))


class SynchronousRollout(RolloutTime):
    """All responses of a step start at once, and the step ends with the longest."""

    @line("responses an engine", "prompts x G / replicas")
    @part
    def sequences(self) -> int:
        return math.ceil(self.demand.responses / self.demand.replicas)

    @part
    def batch(self) -> float:
        """Sequences that an engine runs at the start."""
        return min(self.sequences, self.held)

    @part
    def mixed(self) -> float:
        """State at the start of the drain. 0: all responses have the same age; 1: a steady mixture of ages."""
        return min(1.0, (self.sequences - self.batch) / self.batch)

    @line("s", "prompts of an engine, each once for its G completions")
    @part
    def prefill_s(self) -> float:
        """Seconds of prefill, a part of `total_s`."""
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
    def drain(self) -> tuple[float, float, float, list[float]]:
        """(seconds of the drain, seconds of its tail, responses x seconds, seconds of each interval of the profile)."""
        engine_s, lengths, prompt = self.engine.step_s, self.demand.lengths, self.demand.prompt_tokens
        batch, mixed = self.batch, self.mixed
        age, others = mixed * lengths.mean_residual, self.demand.responses - self.sequences
        drain_s = tail_s = busy = 0.0
        intervals = []
        for start, end, survival, residual in lengths.profile:
            running = (1 - mixed) * survival + mixed * residual
            if running <= 1e-12:        # far below one request; 1 - (1 - running)^batch would round to 0
                break
            ended = (1 - running) ** batch
            here = 1 - ended            # P(one of this engine's still runs)
            anywhere = 1 - ended * (1 - running) ** others
            step_s = engine_s(batch * running / here, prompt + age + (start + end) / 2)
            seconds = (end - start) * anywhere * step_s
            drain_s += seconds
            intervals.append(seconds)
            busy += (end - start) * batch * running * step_s
            if running < TAIL:
                tail_s += seconds
        return drain_s, tail_s, busy, intervals

    @line("s", "integral of P(one of N runs at l) TPOT(n S(l), prompt + l) dl")
    def drain_s(self) -> float:
        return self.drain[0]

    @line("s", "prefill + steady + drain")
    @part
    def total_s(self) -> float:
        return self.prefill_s + self.steady_s + self.drain_s

    @part
    def completions(self) -> tuple[float, ...]:
        """A group is complete with its slowest completion. The share of all tokens that is in groups whose longest
        completion is above x, for G independent lengths l, is

            late(x) = 1 - F(x)^(G - 1) E[l; l <= x] / E[l]

        If all begin together, late(x) of the tokens are in groups that are not complete x tokens later. While requests
        queue, groups are completed at a constant rate, and a share B / N x integral of late / E[l] of all tokens is in
        groups that are left for the drain (renewal theory). There, x tokens later, the integral from x on is left of
        the integral from 0 on.
        """
        lengths = self.demand.lengths
        late = [1.0, *(self._late(end) for _, end, _, _ in lengths.profile)]
        areas = [(end - start) * (before + after) / 2
                 for (start, end, _, _), (before, after) in zip(lengths.profile, pairwise(late), strict=True)]
        whole = sum(areas)
        left_open = min(1.0, self.batch / self.sequences * whole / lengths.mean)
        seconds, area = self.prefill_s + self.steady_s, whole
        curve = [(self.prefill_s, 0.0), (seconds, 1 - left_open)]
        for interval_s, mine, after in zip(self.drain[3], areas, late[1:], strict=False):
            seconds, area = seconds + interval_s, area - mine
            curve.append((seconds, 1 - left_open * ((1 - self.mixed) * after + self.mixed * area / whole)))
        times = [_first_time(curve, (number + 1) / PARTS) for number in range(PARTS - 1)]
        return (*(min(1.0, time_s / self.total_s) for time_s in times), 1.0)

    def _late(self, length: float) -> float:
        """Share of all tokens in groups whose longest completion is above `length`."""
        lengths = self.demand.lengths
        survival = lengths.survival(length)
        below = 1 - lengths.residual_survival(length) - length * survival / lengths.mean       # E[l; l <= x] / E[l]
        return 1 - (1 - survival) ** (self.demand.group - 1) * below

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


def _first_time(curve: Sequence[tuple[float, float]], share: float) -> float:
    """When a rising curve of (seconds, share) reaches a share. Between two points it is linear."""
    for (began, before), (seconds, after) in pairwise(curve):
        if after >= share:
            return began + (seconds - began) * (share - before) / (after - before)
    return curve[-1][0]


class AsynchronousRollout(RolloutTime):
    """Steady state: the engines are always full."""

    @line("responses an engine", "the slots: engines run full")
    @part
    def batch(self) -> float:
        return self.held

    @line("s", "TPOT(batch, active context) + prefill of others per token")
    @part
    def tpot_s(self) -> float:
        demand, lengths = self.demand, self.demand.lengths
        # delay of a token per request that is prefilled meanwhile
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
        """Responses per second."""
        return self.in_flight / (self.demand.lengths.mean * self.tpot_s)

    @property
    def tokens_per_s(self) -> float:
        return self.rate * self.demand.lengths.mean

    @property
    def limit(self) -> str:
        return self._limit(self.batch, self.held < self.demand.max_num_seqs)


def minimum_staleness(rollout: RolloutTime, step_s: float) -> int:
    """The smallest staleness that a strict first-in-first-out queue must allow: the longest response spans
    ceil(l_max TPOT / step) updates."""
    return math.ceil(rollout.latency_max_s / step_s - 1e-9)


def mean_staleness(lengths: Lengths, tpot_s: float, step_s: float, bound: int) -> float:
    """Mean age of a token in versions, where new weights reach running responses. A batch starts k versions early, when
    a commit admits it, and its tokens become younger by one with every commit that their response lives to see:

        k - sum over j = 1..k of P(a token comes at least j steps after its response began)

    This holds for engines with room for the whole batch. Full engines begin later, and their tokens are younger.

    Args:
        bound: k.
    """
    return bound - sum(lengths.residual_survival(min(lengths.cap, number * step_s / tpot_s))
                       for number in range(1, bound + 1))
