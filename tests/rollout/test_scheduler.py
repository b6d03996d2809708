"""Routing over engines: by load, by id, only to those that hold the committed version."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megatron_rl.data.batch import Group, Trajectory
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.weight_sync.protocol import NotServing
from tests.rollout.engines import VOCABULARY, make_prompts

SAMPLING = Sampling(n=4, temperature=1.0, max_new_tokens=10)


class _Engine:
    """The members of a group end one after the other, `delay(prompt)` turns of the event loop apart, or all at once
    after `delay(prompt)` turns. Remembers what it was asked and its peak load."""

    def __init__(self, number: int, delay=lambda prompt: 1, *, at_once: bool = True) -> None:
        self.number, self.delay, self.at_once = number, delay, at_once
        self.asked: list[int] = []
        self.calls = self.running = self.peak = self.all_ended = 0

    async def generate_group(self, prompt, sampling, seed=None):
        self.calls += 1
        self.asked.append(prompt.index)
        self.running += sampling.n
        self.peak = max(self.peak, self.running)
        for ending in [sampling.n] if self.at_once else [1] * sampling.n:
            for _ in range(self.delay(prompt)):
                await asyncio.sleep(0)
            self.running -= ending
            self.all_ended += ending
        trajectory = Trajectory.one_turn(np.array([prompt.index]), np.zeros(1), np.zeros(1), "stop")
        return Group(prompt, (trajectory,) * sampling.n, self.number)

    async def ended(self, count):
        while self.all_ended < count:
            await asyncio.sleep(0)
        return self.all_ended

    async def generate(self, prompts, sampling, step):
        self.calls -= len(prompts) - 1
        return list(await asyncio.gather(*[self.generate_group(prompt, sampling) for prompt in prompts]))


def _rollout(engines, prompts, *, deterministic=False, max_num_seqs=8, versions=None, sampling=SAMPLING):
    scheduler = RolloutScheduler(engines, max_num_seqs=max_num_seqs, vocabulary=VOCABULARY,
                                 deterministic=deterministic)
    scheduler.committed(0, versions)
    return scheduler, asyncio.run(scheduler.rollout(prompts, sampling, 0))


@pytest.mark.parametrize("deterministic", [False, True])
def test_groups_come_back_by_prompt_whatever_the_order_of_arrival(deterministic):
    """NeMo-RL#1627, AReaL#246: late prompts first."""
    prompts = make_prompts(12)
    engines = [_Engine(0, lambda p: 50 - 4 * p.index), _Engine(1, lambda p: 3)]
    _, groups = _rollout(engines, prompts, deterministic=deterministic)
    assert [group.prompt.index for group in groups] == list(range(12))
    assert all(c.token_ids.tolist() == [g.prompt.index] for g in groups for c in g.trajectories)


def test_a_slow_engine_gets_fewer_groups():
    slow, fast = _Engine(0, lambda p: 40), _Engine(1, lambda p: 4)
    scheduler, _ = _rollout([slow, fast], make_prompts(22))
    assert len(fast.asked) > 3 * len(slow.asked) > 0
    assert [each["groups"] for each in scheduler.served().values()] == [len(slow.asked), len(fast.asked)]


def test_no_engine_holds_more_sequences_than_it_decodes_at_once():
    engines = [_Engine(0, lambda p: 5), _Engine(1, lambda p: 9)]
    _rollout(engines, make_prompts(20), max_num_seqs=12)
    assert [engine.peak for engine in engines] == [12, 12]


def test_the_places_of_ended_sequences_are_filled_before_their_group_ends():
    """The members of a group end after 1, 2, 3 and 4 times 20 turns. If only whole groups left, engines would decode
    2.5 sequences of 4."""
    engines = [_Engine(number, lambda p: 20, at_once=False) for number in range(2)]

    async def mean_load() -> float:
        scheduler = RolloutScheduler(engines, max_num_seqs=8, vocabulary=VOCABULARY, deterministic=False)
        scheduler.committed(0)
        rollout, loads = asyncio.ensure_future(scheduler.rollout(make_prompts(60), SAMPLING, 0)), []
        while not rollout.done():
            await asyncio.sleep(0)
            loads.append(sum(engine.running for engine in engines))
        return sum(loads) / len(loads)

    assert asyncio.run(mean_load()) > 0.9 * 2 * 8
    assert all(engine.peak < 8 + SAMPLING.n for engine in engines)


def test_a_group_larger_than_the_limit_still_runs():
    engines = [_Engine(0), _Engine(1)]
    _, groups = _rollout(engines, make_prompts(4), max_num_seqs=2)
    assert len(groups) == 4


def test_deterministic_routing_ignores_load():
    engines = [_Engine(0, lambda p: 100), _Engine(1)]
    _rollout(engines, make_prompts(7), deterministic=True)
    assert engines[0].asked == [0, 2, 4, 6] and engines[1].asked == [1, 3, 5]


def test_one_engine_receives_all_groups_at_once():
    engine = _Engine(0)
    _rollout([engine], make_prompts(16))
    assert engine.peak == 64 and engine.asked == list(range(16))


def test_only_engines_with_the_committed_version_are_routed_to():
    """miles#1725: a restarted engine served before it was synced."""
    engines = [_Engine(0), _Engine(1), _Engine(2)]
    _rollout(engines, make_prompts(9), versions=[0, 2])
    assert engines[1].asked == [] and engines[0].asked and engines[2].asked
    scheduler = RolloutScheduler(engines, max_num_seqs=8, vocabulary=VOCABULARY, deterministic=False)
    with pytest.raises(NotServing, match="no engine holds the committed version"):
        asyncio.run(scheduler.rollout(make_prompts(1), SAMPLING, 0))


def test_an_engine_that_stayed_at_an_older_version_gets_nothing():
    engines = [_Engine(0), _Engine(1), _Engine(2)]
    scheduler, _ = _rollout(engines, make_prompts(9))
    asked = len(engines[1].asked)
    assert asked
    scheduler.committed(1, [0, 2])
    asyncio.run(scheduler.rollout(make_prompts(9), SAMPLING, 1))
    assert len(engines[1].asked) == asked and len(engines[0].asked + engines[2].asked) == 18 - asked


def test_another_prompts_group_is_noticed():
    class Confused(_Engine):
        async def generate(self, prompts, sampling, step):
            return (await super().generate(prompts, sampling, step))[::-1]

    with pytest.raises(RuntimeError, match="asked for 4 trajectories of prompt 0, got 4 of prompt 2"):
        _rollout([Confused(0)], make_prompts(3), deterministic=True)


def test_later_batches_fill_the_room_that_the_first_one_leaves():
    """Groups of the earlier batch are sent first, whatever the order of the calls."""
    engines = [_Engine(0, lambda p: 5), _Engine(1, lambda p: 5)]

    async def run() -> None:
        scheduler = RolloutScheduler(engines, max_num_seqs=4, vocabulary=VOCABULARY, deterministic=False)
        scheduler.committed(0)
        later = asyncio.create_task(scheduler.rollout(make_prompts(8)[4:], SAMPLING, 2))
        first = asyncio.create_task(scheduler.rollout(make_prompts(8)[:4], SAMPLING, 1))
        await asyncio.gather(later, first)

    asyncio.run(run())
    asked = [{engine.asked[at] for engine in engines} for at in range(4)]
    assert asked == [{4, 5}, {0, 1}, {2, 3}, {6, 7}]     # 4 and 5 were sent before batch 1 was known


def test_a_held_scheduler_sends_nothing_until_the_commit_and_a_cancelled_group_leaves_no_load():
    engines = [_Engine(0, lambda p: 5), _Engine(1, lambda p: 5)]

    async def run() -> list[int]:
        scheduler = RolloutScheduler(engines, max_num_seqs=4, vocabulary=VOCABULARY, deterministic=False)
        scheduler.committed(0)
        scheduler.hold(1)
        waiting = asyncio.create_task(scheduler.rollout(make_prompts(4), SAMPLING, 1))
        dropped = asyncio.create_task(scheduler.group(make_prompts(5)[4], SAMPLING, 0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert engines[0].asked == engines[1].asked == []
        scheduler.committed(1)
        dropped.cancel()        # it has an engine by now, and has not sent the request
        await waiting
        return [lane.unfinished for lane in scheduler._lanes.values()]

    assert asyncio.run(run()) == [0, 0] and sorted(engines[0].asked + engines[1].asked) == [0, 1, 2, 3]
