"""The driver's rollout stream and scheduler in virtual time: engines, trainer and rewards are played, with the rates of
a plan. What is measured is the driver's own code: its CPU seconds a step, its memory, and the steps that it makes of
the plan's rates.

An event loop with virtual time runs an hour of a cluster in a second: where all tasks wait, time goes on to the next
timer.
"""

from __future__ import annotations

import asyncio
import bisect
import gc
import heapq
import math
import random
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import psutil

from launch.config.resolved import ResolvedAlgorithm
from launch.planner.prepare import OnCluster, prepare
from launch.planner.workload.lengths import Lengths
from megatron_rl.algorithms.batch import batch_statistics, build_policy_batches
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.rewards.sample import Sample, Score
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.rollout.stream import RolloutStream

Result = TypeVar("Result")
CONFIG, STEPS = "configs/70b/grpo.yaml", 200
SHARE, FLAT = 0.02, 0.05
"""Aims: the driver's own seconds over those of a step, and growth of its memory."""
QUANTILES = 4096
"""Lengths are drawn from so many equally likely ones."""
LOOKED_AT = 25
"""See `play`. A batch takes most of the driver's seconds."""
TICK_S = 2.0
"""`Rates.tick_s` at the rates of a plan for large models."""
SETTLED = 10
"""Steps after which the pipeline is full."""


class _Jump(selectors.SelectSelector):
    """Does not wait: time goes on by what the loop would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all tasks wait for each other")
        self.now += max(0.0, timeout)
        return super().select(0)


def in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on an event loop that never waits."""
    jump = _Jump()
    loop = asyncio.SelectorEventLoop(jump)
    loop.time = lambda: jump.now        # type: ignore[method-assign]  # the loop asks this method for every timer
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


@dataclass(frozen=True)
class Rates:
    """What is played."""

    engines: int
    slots: int
    """Sequences that an engine decodes at once."""
    max_num_seqs: int
    """The limit that the driver knows: the cache may hold fewer."""
    token_s: Callable[[int], float]
    """Seconds a token, given the sequences that an engine decodes."""
    update_s: float
    sync_s: float
    """The engines stop for all of it."""
    lengths: Callable[[random.Random], int]
    cap: int
    prompts: int
    group: int
    prompt_tokens: int = 512
    tick_s: float = 0.0
    """Ends of sequences are looked at this often, which saves the player's time."""


@dataclass(frozen=True)
class Scale:
    """What was measured."""

    step_s: float
    """Virtual seconds of a step, mean after the first ones."""
    stream_s: float
    """CPU seconds of a step in stream and scheduler."""
    batch_s: float
    """CPU seconds in which a step's groups become the trainer's batch."""
    staleness_mean: float
    staleness_max: int
    objects: tuple[int, int]
    """Most live objects in each half of the steps."""
    resident: tuple[int, int]
    """Most resident bytes of the process in each half. They include what the allocator keeps between arrays."""
    running: float
    """Mean share of the slots that decode."""
    steps: int


@dataclass
class _Played:
    """CPU seconds of the played parts, which are not the driver's."""

    seconds: float = 0.0


@dataclass(eq=False)
class _Engine:
    """Continuous batching: all running sequences advance together, at a rate that depends on their number."""

    rates: Rates
    played: _Played
    random: random.Random
    made: float = 0.0
    """Tokens that a sequence has made which runs since the start."""
    at: float = 0.0
    """Time of `made`."""
    busy: float = 0.0
    """Integral of running sequences over time."""
    stopped: bool = False
    version: int = 0
    swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    """(`made`, version) at each commit."""
    running: list[tuple[float, int, Any]] = field(default_factory=list)
    waiting: deque[tuple[int, Any]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None
    number: int = 0
    finished: int = 0
    more: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at every end of sequences."""
    pool: dict[str, np.ndarray] = field(default_factory=dict)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Any:
        raise RuntimeError("a played engine has no deterministic mode")

    async def generate_group(self, prompt: Prompt, sampling: Sampling, seed: int | None = None) -> Group:
        began = time.process_time()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group: list[Any] = [prompt, sampling.n, done, []]
        self._advance()
        self.waiting += [(self.rates.lengths(self.random), group) for _ in range(sampling.n)]
        self._admit()
        self.played.seconds += time.process_time() - began
        await done
        began = time.process_time()
        answer = Group(prompt, tuple(self._trajectory(*each) for each in group[3]))
        self.played.seconds += time.process_time() - began
        return answer

    async def ended(self, count: int) -> int:
        while self.finished < count:
            self.more.clear()
            await self.more.wait()
        return self.finished

    def stop(self) -> None:
        self._advance()
        self.stopped = True
        self._admit()

    def commit(self, version: int) -> None:
        self.at = asyncio.get_running_loop().time()
        self.stopped, self.version = False, version
        self.swaps = [*self.swaps[-16:], (self.made, version)]
        self._admit()

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.running and not self.stopped:
            self.made += (now - self.at) / self.rates.token_s(len(self.running))
            self.busy += (now - self.at) * len(self.running)
        self.at = now

    def _admit(self) -> None:
        """Start what waits, and set the timer for the next end."""
        while self.waiting and len(self.running) < self.rates.slots:
            length, group = self.waiting.popleft()
            self.number += 1
            heapq.heappush(self.running, (self.made + length, self.number, (self.made, length, group)))
        if self.timer is not None and (self.stopped or not self.rates.tick_s):
            self.timer.cancel()
            self.timer = None
        if self.running and not self.stopped and self.timer is None:
            wait = (self.running[0][0] - self.made) * self.rates.token_s(len(self.running))
            self.timer = asyncio.get_running_loop().call_later(max(wait, self.rates.tick_s), self._ends)

    def _ends(self) -> None:
        began, self.timer = time.process_time(), None
        self._advance()
        while self.running and self.running[0][0] <= self.made + 1e-6:
            _, _, (start, length, group) = heapq.heappop(self.running)
            group[3].append((start, length))
            self.finished += 1
            if len(group[3]) == group[1] and not group[2].done():
                group[2].set_result(None)
        self._admit()
        self.more.set()
        self.played.seconds += time.process_time() - began

    def _trajectory(self, start: float, length: int) -> Trajectory:
        """Tokens, log-probs and flags are views of one array. Versions are the sequence's own."""
        if not self.pool:
            cap = self.rates.cap
            self.pool = {"ids": np.zeros(cap, np.int32), "sampled": np.ones(cap, bool),
                         "logprobs": np.zeros(cap, np.float32)}
        later = bisect.bisect_right(self.swaps, (start, self.version))
        versions_R = np.full(length, self.swaps[later - 1][1], np.int32)
        for made, version in self.swaps[later:]:
            versions_R[math.ceil(made - start):] = version
        return Trajectory(self.pool["ids"][:length], self.pool["sampled"][:length], self.pool["logprobs"][:length],
                          versions_R, "length" if length == self.rates.cap else "stop")


@dataclass
class _Rewards:
    played: _Played

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        await asyncio.sleep(0.1)
        began = time.process_time()
        scores = [Score(float(sample.sample_index % 2)) for sample in samples]
        self.played.seconds += time.process_time() - began
        return scores


async def play(rates: Rates, algorithm: ResolvedAlgorithm, max_staleness: int, steps: int, *, border: bool = False,
               looked_at: int = LOOKED_AT) -> Scale:
    """Train `steps` steps with what a run uses between engines and trainer. The trainer's batch is built, and ages and
    memory are read, in every `looked_at`th step."""
    loop, played = asyncio.get_running_loop(), _Played()
    engines = [_Engine(rates, played, random.Random(number)) for number in range(rates.engines)]
    scheduler = RolloutScheduler(engines, max_num_seqs=rates.max_num_seqs, vocabulary=1, deterministic=False)
    prompts = [Prompt(row, np.zeros(rates.prompt_tokens, np.int32), "", "1", {}) for row in range(rates.prompts)]
    stream = RolloutStream(lambda: prompts, scheduler, _Rewards(played),
                           Sampling(rates.group, 1.0, rates.cap), max_staleness=max_staleness,
                           last=steps + max_staleness)
    scheduler.committed(0)
    stream.committed(0)
    memory: list[tuple[int, int]] = []
    ends, stream_s, batch_s, mean_ages, oldest = [], [], [], [], 0
    for step in range(1, steps + 1):
        began, others = time.process_time(), played.seconds
        batch = await stream.batch(step)
        if step % looked_at == 0:
            before = time.process_time()
            rewards = [np.array([score.total for score in scores]) for scores in batch.scores]
            batch_statistics(batch.groups, rewards, algorithm)
            build_policy_batches(batch.groups, rewards, algorithm, rates.cap, version=step - 1)
            batch_s.append(time.process_time() - before)
            began += batch_s[-1]
            ages = [step - 1 - each.weight_versions for group in batch.groups for each in group.trajectories]
            mean_ages.append(float(np.concatenate(ages).mean()))
            oldest = max(oldest, *(int(each.max()) for each in ages))
            memory.append(_memory())
            began += time.process_time() - before - batch_s[-1]
        del batch
        await asyncio.sleep(rates.update_s)
        if border:
            await stream.drained()
        scheduler.hold(step)
        for engine in engines:
            engine.stop()
        await asyncio.sleep(rates.sync_s)
        for engine in engines:
            engine.commit(step)
        scheduler.committed(step)
        stream.committed(step)
        ends.append(loop.time())
        stream_s.append(time.process_time() - began - (played.seconds - others))
        if step == min(SETTLED, steps - 1):
            first = loop.time(), sum(engine.busy for engine in engines)
    busy = (sum(engine.busy for engine in engines) - first[1]) / (loop.time() - first[0])
    await stream.close()
    settled = min(SETTLED, steps - 1)
    return Scale(step_s=(ends[-1] - ends[settled - 1]) / (steps - settled), stream_s=fmean(stream_s[settled:]),
                 batch_s=fmean(batch_s or [0.0]), staleness_mean=fmean(mean_ages or [0.0]), staleness_max=oldest,
                 objects=_most([each for each, _ in memory]), resident=_most([each for _, each in memory]),
                 running=busy / (rates.engines * rates.slots), steps=steps)


def _memory() -> tuple[int, int]:
    """(live objects, resident bytes)."""
    gc.collect()
    return len(gc.get_objects()), int(psutil.Process().memory_info().rss)


def _most(values: Sequence[int]) -> tuple[int, int]:
    half = len(values) // 2
    return max(values[:half], default=0), max(values[half:], default=0)


def rates_of(made: OnCluster) -> Rates:
    """The rates of a plan for a cluster."""
    found = made.found
    rollout, workload = found.rollout, found.problem.workload
    demand, engine = rollout.demand, rollout.engine
    context = workload.lengths.active_context(workload.prompt_tokens)
    return Rates(engines=demand.replicas, slots=int(demand.slots), max_num_seqs=demand.max_num_seqs,
                 token_s=_cached(lambda running: engine.step_s(running, context)), update_s=found.training.seconds,
                 sync_s=found.sync_s, lengths=drawn(workload.lengths), cap=workload.lengths.cap,
                 prompts=workload.prompts, group=workload.group, prompt_tokens=int(workload.prompt_tokens),
                 tick_s=TICK_S)


def _cached(token_s: Callable[[int], float]) -> Callable[[int], float]:
    known: dict[int, float] = {}

    def seconds(running: int) -> float:
        if running not in known:
            known[running] = token_s(running)
        return known[running]

    return seconds


def drawn(lengths: Lengths) -> Callable[[random.Random], int]:
    """Draws a length of a distribution, in whole tokens."""
    table = [max(1, round(lengths.quantile((number + 0.5) / QUANTILES))) for number in range(QUANTILES)]
    return lambda source: source.choice(table)


def table(steps: int) -> str:
    """The driver at the rates of the 70B plan, as text."""
    made = prepare(CONFIG)
    assert isinstance(made, OnCluster)
    rates, bound = rates_of(made), made.config.algorithm.max_staleness
    found = in_virtual_time(play(rates, made.config.algorithm, bound, steps))
    own = (found.stream_s + found.batch_s) / found.step_s
    grown, resident = (after / before - 1 for before, after in (found.objects, found.resident))
    return "\n".join([
        f"{CONFIG}: {rates.engines} engines of {rates.slots} slots, {rates.prompts} groups of {rates.group}, "
        f"k = {bound}, {steps} steps in virtual time", "",
        f"step           {found.step_s:8.1f} s       in virtual time; update + sync: "
        f"{rates.update_s + rates.sync_s:.1f} s; planned: {made.plan.forecast.step_s:.1f} s",
        f"full slots     {found.running:8.0%}",
        f"staleness      {found.staleness_mean:8.2f}         mean, at most {found.staleness_max}; planned: "
        f"{made.plan.forecast.staleness.mean:.2f}",
        f"driver         {found.stream_s:8.2f} s       measured: stream and scheduler, CPU seconds a step",
        f"               {found.batch_s:8.2f} s       measured: the trainer's batch",
        f"               {own:8.2%}         of a step (aim: under {SHARE:.0%}): {'met' if own < SHARE else 'missed'}",
        f"memory         {grown:+8.1%}         live objects, the most of the second half of the steps over the first",
        f"                               (aim: flat, within {FLAT:.0%}): {'met' if grown <= FLAT else 'missed'}",
        f"               {resident:+8.1%}         resident bytes: {found.resident[1] / 2**20:.0f} MiB with what the "
        "allocator keeps"])
