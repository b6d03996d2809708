"""Completions over several reward actors: balanced, in order, and nothing is lost with an actor."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import selectors
from collections import Counter
from collections.abc import Sequence

import pytest

from launch.errors import UserError
from megatron_rl.driver.cluster import ComponentDied
from megatron_rl.driver.rewards import CODE, Rewards
from megatron_rl.rewards.sample import Sample, Score

GROUP = 4


class Actor:
    """A node's reward processes on the clock of the event loop: `processes` samples at a time, each as long as its
    completion says, and first come, first served."""

    def __init__(self, number: int, processes: int) -> None:
        self.name, self._free = f"reward-{number}", asyncio.Semaphore(processes)
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scored: list[Sample] = []
        self.busy_s = 0.0

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        work = asyncio.gather(*(self._one(sample) for sample in samples))
        await asyncio.wait([work, self._dead], return_when=asyncio.FIRST_COMPLETED)
        if self._dead.done():
            work.cancel()
            await self._dead
        return await work

    async def stay(self) -> None:
        await asyncio.shield(self._dead)

    async def close(self) -> None:
        pass

    def die(self) -> None:
        self._dead.set_exception(ComponentDied(self.name, "its process died"))

    async def _one(self, sample: Sample) -> Score:
        async with self._free:
            seconds = float(sample.completion)
            await asyncio.sleep(seconds)
            if sample.answer == "user error":
                raise UserError("a reward fails")
            self.busy_s += seconds
            self.scored.append(sample)
            return Score(float(sample.prompt_index * GROUP + sample.sample_index))


class Job:
    """Rewards over some actors, with what they tell the launcher and the user."""

    def __init__(self, nodes: int, processes: int) -> None:
        self.actors = [Actor(number, processes) for number in range(nodes)]
        self.dismissed: list[str] = []
        self.notes: list[tuple[str, str]] = []
        self.rewards = Rewards(self.actors, processes, self.dismissed.append,
                               lambda code, message, evidence: self.notes.append((code, message)))

    async def all(self, groups: Sequence[Sequence[Sample]]) -> list[list[Score]]:
        return await asyncio.gather(*(self.rewards.score(group) for group in groups))


def groups_of(count: int, seconds: float = 0.01) -> list[list[Sample]]:
    return [[Sample(str(seconds), None, prompt_index=group, sample_index=sample) for sample in range(GROUP)]
            for group in range(count)]


class Jump(selectors.DefaultSelector):
    """A clock that jumps to the next timer: seconds cost none, and load on the machine changes nothing."""

    now = 0.0

    def select(self, timeout: float | None = None):
        self.now += timeout or 0.0
        return super().select(0)


def run(main) -> None:
    def made() -> asyncio.AbstractEventLoop:
        jump = Jump()
        loop = asyncio.SelectorEventLoop(jump)
        loop.time = lambda: jump.now
        return loop

    with asyncio.Runner(loop_factory=made) as runner:
        runner.run(main())
    gc.collect()        # here, and not in the middle of another test


def test_scores_belong_to_their_samples_whichever_actor_gave_them():
    async def main() -> None:
        job = Job(3, 2)
        for count in (1, 2, 20):
            scores = await job.all(groups_of(count))
            assert [[score.total for score in group] for group in scores] == [
                [group * GROUP + sample for sample in range(GROUP)] for group in range(count)]
        assert all(actor.scored for actor in job.actors)

    run(main)


@pytest.mark.parametrize("slow_s", [0.01, 10.0])
def test_work_is_balanced_over_the_actors(slow_s):
    """Every 16th group has a slow sample, and there are four actors: dealt out in turn, one actor would get them all.
    No schedule is shorter than all work over all processes. One that lets no process wait while there is work is at
    most one job longer (Graham 1966), here one group; the groups that wait at an actor may add another."""
    async def main() -> None:
        job, groups = Job(4, 3), groups_of(240)
        for group in groups[::16]:
            group[0] = dataclasses.replace(group[0], completion=str(slow_s))
        began = asyncio.get_running_loop().time()
        await job.all(groups)
        took_s = asyncio.get_running_loop().time() - began
        seconds = [sum(float(sample.completion) for sample in group) for group in groups]
        assert took_s <= sum(seconds) / 12 + 2 * max(seconds)
        if slow_s == 0.01:
            assert {len(actor.scored) for actor in job.actors} == {60 * GROUP}

    run(main)


def test_a_group_goes_to_the_actor_that_has_least_to_do():
    async def main() -> None:
        job = Job(2, 1)
        long = asyncio.create_task(job.rewards.score(groups_of(1, 5.0)[0]))
        await asyncio.sleep(0)
        for group in groups_of(6):
            await job.rewards.score(group)
        assert Counter(actor.name for actor in job.actors for _ in actor.scored) == {"reward-1": 6 * GROUP}
        assert len(await long) == GROUP

    run(main)


@pytest.mark.parametrize("busy", [True, False])
def test_the_death_of_an_actor_loses_nothing_and_is_told_once(busy):
    async def main() -> None:
        job, groups = Job(3, 2), groups_of(30, 0.1)
        work = asyncio.create_task(job.all(groups if busy else []))
        await asyncio.sleep(0.25)
        job.actors[1].die()
        scores = await work
        assert [[score.total for score in group] for group in scores] == [
            [group * GROUP + sample for sample in range(GROUP)] for group in range(30 if busy else 0)]
        await asyncio.sleep(0.01)
        assert job.dismissed == ["reward-1"] and job.rewards.serving == ["reward-0", "reward-2"]
        ((code, message),) = job.notes
        assert code == CODE and message.startswith("reward-1: its process died; 2 others score its completions")
        await job.all(groups_of(3))
        await job.rewards.close(1.0)

    run(main)


def test_the_death_of_the_last_actor_ends_the_attempt():
    async def main() -> None:
        job = Job(2, 1)
        work = asyncio.create_task(job.all(groups_of(4, 1.0)))
        await asyncio.sleep(0.5)
        for actor in job.actors:
            actor.die()
        with pytest.raises(ComponentDied):
            await work
        assert len(job.dismissed) == 1, "the launcher sees the other one dead, and says why the attempt ended"

    run(main)


def test_a_reward_that_fails_is_raised_and_moves_no_completion():
    async def main() -> None:
        job = Job(2, 1)
        with pytest.raises(UserError, match="a reward fails"):
            await job.rewards.score([Sample("0.1", "user error")])
        assert not job.dismissed and len(job.rewards.serving) == 2

    run(main)
