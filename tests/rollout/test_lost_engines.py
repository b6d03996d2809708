"""Engines that die, hang or return nonsense: every group comes back once, from an engine that was sound, or the last
failure is told."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.weight_sync.protocol import NotServing
from tests.rollout.engines import VOCABULARY, make_prompts

SAMPLING = Sampling(n=2, temperature=1.0, max_new_tokens=8)
FATES = ("dies", "hangs", "wrong prompt", "too few", "token", "version", "not finite")
VERSION = 5


def group_of(prompt: Prompt, engine: int = 0, **changes) -> Group:
    trajectory = Trajectory.one_turn(np.array([prompt.index, engine], np.int32), np.full(2, -0.5, np.float32),
                                     np.full(2, VERSION, np.int32), "stop")
    return Group(prompt, (replace(trajectory, **changes),) * SAMPLING.n, engine)


def spoiled(prompt: Prompt, fate: str) -> Group:
    """The group that an engine with this fate returns."""
    group = group_of(prompt)
    changes = {"token": {"token_ids": np.array([0, VOCABULARY], np.int32)},
               "version": {"weight_versions": np.array([VERSION, VERSION + 1], np.int32)},
               "not finite": {"logprobs": np.array([-0.5, np.nan], np.float32)}}
    if fate == "wrong prompt":
        return Group(replace(prompt, index=prompt.index + 1), group.trajectories)
    return Group(prompt, group.trajectories[1:]) if fate == "too few" else group_of(prompt, **changes[fate])


class Mortal:
    """Answers `answers` groups after a random number of turns; then its fate strikes."""

    def __init__(self, number: int, order: random.Random, fate: str | None = None, answers: int = 0) -> None:
        self.number, self.order, self.fate, self.answers = number, order, fate, answers
        self.struck = False
        self.asked: list[int] = []

    async def generate_group(self, prompt, sampling, seed=None) -> Group:
        self.asked.append(prompt.index)
        for _ in range(self.order.randrange(1, 9)):
            await asyncio.sleep(0)
        self.answers -= 1
        if self.fate is None or self.answers >= 0:
            return group_of(prompt, self.number)
        self.struck = True
        if self.fate == "dies":
            raise RuntimeError(f"engine {self.number} died")
        if self.fate == "hangs":
            await asyncio.Event().wait()
        return spoiled(prompt, self.fate)

    async def ended(self, count):
        return await asyncio.get_running_loop().create_future()     # whole groups make room

    async def generate(self, prompts, sampling, step):
        return list(await asyncio.gather(*[self.generate_group(prompt, sampling) for prompt in prompts]))


def scheduler_of(engines, *, deterministic: bool = False, max_num_seqs: int = 8) -> RolloutScheduler:
    scheduler = RolloutScheduler(engines, max_num_seqs=max_num_seqs, vocabulary=VOCABULARY,
                                 deterministic=deterministic)
    scheduler.committed(VERSION)
    return scheduler


fates = st.tuples(st.sampled_from(FATES), st.integers(0, 6))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.lists(fates, min_size=1, max_size=3), min_size=1, max_size=4))
def test_every_group_comes_back_exactly_once(seed, lives):
    """Replica 0 is sound. Every other one lives several lives, and each ends in its own way. It returns to the routing
    after some time, as after a sync."""
    order, prompts = random.Random(seed), make_prompts(20)
    engines: list[Mortal] = [Mortal(0, order)]
    routed: dict[int, Mortal] = {0: engines[0]}
    left = {replica: iter(life) for replica, life in enumerate(lives, 1)}

    def born(replica: int) -> Mortal | None:
        fate = next(left[replica], None)
        if fate is None:
            return None
        engines.append(Mortal(len(engines), order, *fate))
        routed[replica] = engines[-1]
        return engines[-1]

    async def run() -> list[Group]:
        scheduler = scheduler_of([engines[0], *[born(replica) for replica in left]])
        lost: list[int] = []

        def failed(replica: int, error: Exception) -> None:
            assert routed[replica].struck, error
            lost.append(replica)
            assert scheduler.leave(replica, error)

        scheduler.on_failure = failed
        answers = asyncio.ensure_future(scheduler.rollout(prompts, SAMPLING, 1))
        while not answers.done():
            await asyncio.sleep(0)
            for replica in list(scheduler.served()):        # the watch finds those that hang
                if routed[replica].struck and routed[replica].fate == "hangs":
                    failed(replica, RuntimeError("hangs"))
            if lost and order.random() < 0.05:
                replica = lost.pop()
                if (again := born(replica)) is not None:
                    scheduler.enter(replica, again)
                    scheduler.committed(VERSION)
        assert all(lane.unfinished == 0 for lane in scheduler._lanes.values())
        assert len(asyncio.all_tasks()) == 1
        return answers.result()

    groups = asyncio.run(run())
    assert [group.prompt.index for group in groups] == [prompt.index for prompt in prompts]
    for group, prompt in zip(groups, prompts, strict=True):
        assert [each.token_ids.tolist() for each in group.trajectories] == [[prompt.index, group.engine]] * SAMPLING.n


@pytest.mark.parametrize("fate, message", [
    ("dies", "engine 0 died"),
    ("wrong prompt", r"asked for 2 trajectories of prompt \d, got 2 of prompt \d"),
    ("too few", r"asked for 2 trajectories of prompt (\d), got 1 of prompt \1"),
    ("token", f"has token ids from 0 to {VOCABULARY}, and only 0 to {VOCABULARY - 1} exist"),
    ("version", f"has weight versions from {VERSION} to {VERSION + 1}, and only {VERSION} to {VERSION} exist"),
    ("not finite", "log-probs that are not finite"),
])
@pytest.mark.parametrize("deterministic", [False, True])
def test_without_another_engine_the_failure_is_told_and_nothing_runs_on(fate, message, deterministic):
    """With fixed routing, the results depend on which engine serves a group, so the others are no substitute."""
    order = random.Random(0)
    engines = [Mortal(0, order, fate), *([Mortal(1, order)] if deterministic else [])]

    async def run() -> int:
        scheduler = scheduler_of(engines, deterministic=deterministic)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                await scheduler.rollout(make_prompts(4), SAMPLING, 1)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert all(set(engine.asked) <= {engine.number, engine.number + 2} for engine in engines[1:])


def test_a_version_that_is_being_committed_is_known():
    """In a sync, an engine may finish a group after its own commit and before that of the others."""
    async def run(coming: int) -> int:
        scheduler = RolloutScheduler([Mortal(0, random.Random(0)), Mortal(1, random.Random(0))], max_num_seqs=8,
                                     vocabulary=VOCABULARY, deterministic=False)
        scheduler.committed(VERSION - 1)
        asked = asyncio.ensure_future(scheduler.rollout(make_prompts(2), SAMPLING, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scheduler.hold(coming)
        done, _ = await asyncio.wait([asked], timeout=0.1)
        asked.cancel()
        return len(done)

    assert asyncio.run(run(VERSION)) == 1


def test_a_request_that_meets_a_sync_is_asked_again_and_its_engine_stays():
    class AtTheDoor(Mortal):
        async def generate_group(self, prompt, sampling, seed=None):
            if len(self.asked) < 2:
                self.asked.append(prompt.index)
                raise NotServing("engine 0 is updating")
            return await super().generate_group(prompt, sampling)

    engine = AtTheDoor(0, random.Random(0))

    async def run() -> list[Group]:
        scheduler = scheduler_of([engine])
        asked = asyncio.ensure_future(scheduler.rollout(make_prompts(2), SAMPLING, 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        scheduler.hold(VERSION + 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engine.asked) == 2 and not asked.done()
        scheduler.committed(VERSION + 1)
        return await asked

    assert [group.prompt.index for group in asyncio.run(run())] == [0, 1]


def test_a_prompt_that_no_engine_can_serve_is_the_users_error():
    class Refuses(Mortal):
        async def generate_group(self, prompt, sampling, seed=None):
            raise UserError("the prompt is too long")

    async def run() -> int:
        scheduler = scheduler_of([Refuses(0, random.Random(0)), Refuses(1, random.Random(0))])
        with pytest.raises(UserError, match="too long"):
            await scheduler.group(make_prompts(1)[0], SAMPLING, 1)
        return len(scheduler.served())

    assert asyncio.run(run()) == 2, "no engine is at fault"


def test_a_replaced_engine_serves_from_the_next_commit_on():
    first, second, again = (Mortal(number, random.Random(0)) for number in range(3))

    async def run() -> None:
        scheduler = scheduler_of([first, second])
        assert scheduler.leave(1, RuntimeError("died"))
        scheduler.enter(1, again)
        assert not scheduler.spares(0), "it holds nothing yet"
        await scheduler.rollout(make_prompts(8), SAMPLING, 1)
        assert not again.asked and not second.asked and len(first.asked) == 8
        scheduler.committed(VERSION + 1)
        await scheduler.rollout(make_prompts(8), SAMPLING, 1)
        assert again.asked and scheduler.served()[1]["groups"] == len(again.asked)

    asyncio.run(run())
