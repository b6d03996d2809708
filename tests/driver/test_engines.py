"""The engines of a run: which failures the run survives, how often an engine is started again, and when it serves."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from megatron_rl.driver import engines as module
from megatron_rl.driver.cluster import ComponentFailed
from megatron_rl.driver.engines import Engines, Means
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.weight_sync.protocol import SyncError, SyncReport
from tests.patience import patient
from tests.rollout.engines import VOCABULARY, make_prompts
from tests.rollout.test_lost_engines import SAMPLING, VERSION, Mortal

HANG_S = 0.3
"""How long an engine may be silent in these tests. They wait for it to pass."""


class Process(Mortal):
    """One process of a replica: answers, or dies, or says nothing, or makes no progress."""

    def __init__(self, name: str, life: int) -> None:
        super().__init__(int(name[-1]), random.Random(0))
        self.name, self.life, self.killed = name, life, False
        self.state, self.unfinished, self.tokens, self.moves = "serving", 0, 1, False
        self.error: Exception | None = None
        self.mute = False

    async def status(self):
        if self.mute:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.tokens += self.moves
        return {"state": self.state, "unfinished": self.unfinished, "generated_tokens": self.tokens}

    def dies(self) -> None:
        self.error = ComponentFailed(self.name, "its process died (ActorDiedError)")

    def kill(self) -> None:
        self.killed = True
        self.dies()

    async def stop(self) -> None: ...


@dataclass
class World:
    """The engines of a run, and what they tell the launcher, the sync and the user."""

    replicas: int = 2
    deterministic: bool = False
    refuses: int = 0
    """How many starts fail."""
    told: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    processes: dict[int, list[Process]] = field(default_factory=dict)
    version: int = VERSION

    async def start_again(self, replica: int) -> Process:
        if self.refuses:
            self.refuses -= 1
            raise RuntimeError("no memory left")
        lives = self.processes.setdefault(replica, [])
        lives.append(Process(f"rollout-{replica}", len(lives)))
        return lives[-1]

    async def leave(self, replicas) -> None:
        self.told += [("leave", f"rollout-{replica}") for replica in sorted(replicas)]

    async def admit(self, replica: int, engine: Process) -> None:
        self.told.append(("admit", f"{engine.name}.{engine.life}"))
        if engine.error is not None:
            raise SyncError(f"engine {replica}: {engine.error}")

    async def sync(self, lost: tuple[str, ...] = ()) -> None:
        """A sync as the job makes it."""
        self.version += 1
        self.scheduler.hold(self.version)
        await self.engines.before_sync()
        self.engines.after_sync(SyncReport(self.version, 1, 0, {}, lost))
        self.scheduler.committed(self.version)

    @asynccontextmanager
    async def running(self, monkeypatch):
        monkeypatch.setattr(module, "ASK_EVERY_S", HANG_S / 30)
        first = [await self.start_again(replica) for replica in range(self.replicas)]
        self.scheduler = RolloutScheduler(first, max_num_seqs=8, vocabulary=VOCABULARY,
                                          deterministic=self.deterministic)
        self.scheduler.committed(self.version)
        means = Means(self.start_again, lambda name: self.told.append(("dismiss", name)),
                      lambda name, error: self.told.append(("blame", f"{name}: {error}")),
                      lambda code, message, evidence: self.notes.append(message))
        self.engines = Engines(first, self.scheduler, self, means, hang_s=HANG_S, first_s=3 * HANG_S)
        yield
        await self.engines.stop(1.0)
        assert len(asyncio.all_tasks()) == 1

    async def until(self, condition) -> None:
        async with asyncio.timeout(patient(10)):
            while not condition():
                await asyncio.sleep(HANG_S / 100)

    async def until_started(self, replica: int, lives: int) -> Process:
        await self.until(lambda: len(self.processes[replica]) == lives
                         and not self.engines._seats[replica].down.is_set())
        return self.processes[replica][-1]

    def run(self, monkeypatch, story) -> None:
        async def whole() -> None:
            async with self.running(monkeypatch):
                await story()

        asyncio.run(whole())


def test_a_dead_engine_is_started_again_and_serves_after_the_next_sync(monkeypatch):
    world = World()

    async def story() -> None:
        world.processes[1][0].dies()
        again = await world.until_started(1, 2)
        assert world.processes[1][0].killed, "what is left of it must end"
        assert world.told == [("dismiss", "rollout-1")]
        await world.scheduler.rollout(make_prompts(8), SAMPLING, 1)
        assert world.engines.metrics() == {"engines/serving": 1, "engines/restarts": 1} and not again.asked
        await world.sync()
        assert world.told[1:] == [("leave", "rollout-1"), ("admit", "rollout-1.1")]
        assert world.engines.metrics() == {"engines/serving": 2, "engines/restarts": 1}
        await world.scheduler.rollout(make_prompts(8), SAMPLING, 1)
        assert again.asked
        assert len(world.notes) == 2 and "its process died (ActorDiedError)" in world.notes[0]
        assert world.notes[1] == f"rollout-1 was started again and serves version {world.version}"
        await world.sync()
        assert world.told[3:] == [], "it is on the lanes"

    world.run(monkeypatch, story)


@pytest.mark.parametrize("how, message", [("mute", "hangs: no answer for "),
                                          ("stuck", "hangs: 3 requests and no new token for ")])
def test_an_engine_that_hangs_is_replaced(monkeypatch, how, message):
    world = World()

    async def story() -> None:
        one = world.processes[1][0]
        one.mute, one.unfinished = how == "mute", 3
        await world.until_started(1, 2)
        assert message in world.notes[0] and one.killed

    world.run(monkeypatch, story)


@pytest.mark.parametrize("how", ["idle", "in a sync", "at work", "the only one", "deterministic"])
def test_who_is_not_hanging_or_cannot_be_replaced_is_left_alone(monkeypatch, how):
    """A hang of the only engine is the hang watch's, which takes the stacks."""
    world = World(replicas=1 if how == "the only one" else 2, deterministic=how == "deterministic")

    async def story() -> None:
        for each in (each for (each,) in world.processes.values()):
            each.unfinished = 0 if how == "idle" else 3
            each.state = "updating" if how == "in a sync" else "serving"
            each.moves = how == "at work"
        await asyncio.sleep(3 * HANG_S)
        assert not world.notes and not world.told

    world.run(monkeypatch, story)


def test_an_engine_that_has_not_sampled_yet_has_more_time(monkeypatch):
    world = World()

    async def story() -> None:
        world.processes[1][0].unfinished, world.processes[1][0].tokens = 3, 0
        await asyncio.sleep(2 * HANG_S)
        assert not world.notes
        await world.until(lambda: world.notes)

    world.run(monkeypatch, story)


def test_the_fourth_failure_within_an_hour_is_the_last(monkeypatch):
    """One of the three starts fails, and counts."""
    world = World()

    async def story() -> None:
        world.processes[1][0].dies()
        (await world.until_started(1, 2)).dies()
        world.refuses = 1
        (await world.until_started(1, 3)).dies()
        await world.until(lambda: len(world.notes) == 5)
        assert [note.split(":")[0] for note in world.notes[2:]] == [
            "rollout-1 could not be started again",
            "rollout-1 failed and leaves the routing; its unfinished groups start again on other engines",
            "rollout-1 was started again 3 times within 60 minutes and stays out until the next attempt"]
        await world.sync()
        await asyncio.sleep(HANG_S)
        assert len(world.processes[1]) == 3 and len(world.notes) == 5
        assert world.engines.metrics() == {"engines/serving": 1, "engines/restarts": 3}
        await world.scheduler.rollout(make_prompts(8), SAMPLING, 1)

    world.run(monkeypatch, story)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fate", ["dies", "token"])
def test_a_failure_that_the_run_cannot_survive_is_the_launchers(monkeypatch, deterministic, fate):
    """Nobody is dismissed, so the launcher ends the attempt for a death. An engine that lives gets the blame here."""
    world = World(replicas=2 if deterministic else 1, deterministic=deterministic)

    async def story() -> None:
        one = world.processes[0][0]
        if fate == "dies":
            one.dies()
            await world.until(lambda: world.engines._over)
        one.fate = fate
        with pytest.raises(RuntimeError) as caught:
            await world.scheduler.rollout(make_prompts(2), SAMPLING, 1)
        assert world.told == ([("blame", f"rollout-0: {caught.value}")] if fate == "token" else [])
        assert not one.killed and not world.notes and world.engines.metrics()["engines/restarts"] == 0

    world.run(monkeypatch, story)


def test_an_engine_that_the_sync_lost_is_replaced(monkeypatch):
    world = World()

    async def story() -> None:
        await world.sync(lost=("engine 0",))
        assert list(world.engines.serving) == [1]
        await world.until_started(0, 2)
        await world.sync()
        assert list(world.engines.serving) == [0, 1]

    world.run(monkeypatch, story)


@pytest.mark.parametrize("when", ["before the sync", "at its admission", "in the sync"])
def test_an_engine_that_dies_again_before_it_serves_is_started_once_more(monkeypatch, when):
    world = World()

    async def story() -> None:
        world.processes[1][0].dies()
        again = await world.until_started(1, 2)
        if when != "in the sync":
            again.dies()
        if when == "before the sync":
            await world.until_started(1, 3)
        await world.sync(lost=("engine 1",) if when == "in the sync" else ())
        if when != "before the sync":
            assert list(world.engines.serving) == [0] and not any("serves" in note for note in world.notes)
            await world.until_started(1, 3)
            await world.sync()
        assert list(world.engines.serving) == [0, 1] and world.told[-1] == ("admit", "rollout-1.2")
        assert world.notes[-1] == f"rollout-1 was started again and serves version {world.version}"

    world.run(monkeypatch, story)
