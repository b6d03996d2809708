"""A COMMIT that the coordinator no longer waits for: every moment at which an epoch can be discarded meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.weights import EngineWeights
from megatron_rl.weight_sync.protocol import EngineState, NotServing, SyncError
from tests.patience import patient

STEPS = ("sync_end", "label_version", "reset_prefix_cache", "resume")


class SlowEngine:
    """vLLM's part of a commit, which stops at one call until it is let on. It holds one frozen request."""

    unfinished = 1

    def __init__(self, stops_at: str) -> None:
        self._stops_at, self.reached, self.go_on, self.calls = stops_at, asyncio.Event(), asyncio.Event(), []

    async def _at(self, name: str) -> None:
        self.calls.append(name)
        if name == self._stops_at:
            self.reached.set()
            await self.go_on.wait()

    async def rpc(self, method: str, *args: object) -> list[dict]:
        await self._at(method)
        return [{}]

    async def freeze(self, *, clear_cache: bool) -> None:
        await self._at("freeze")

    async def label_version(self, version: str) -> None:
        await self._at("label_version")

    async def reset_prefix_cache(self, *, preempt: bool) -> bool:
        await self._at("reset_prefix_cache")
        return True

    async def resume(self) -> None:
        await self._at("resume")


@pytest.mark.parametrize("step, staging", [*((step, "in_place") for step in STEPS),
                                           *((step, "shadow") for step in ("sync_swap", *STEPS))])
def test_an_epoch_that_was_discarded_meanwhile_is_never_served(step, staging):
    async def story() -> None:
        engine = SlowEngine(step)
        weights = EngineWeights(engine, 0, 1, "float32", None, staging)
        await weights.sync_prepare(5)
        commit = asyncio.ensure_future(weights.sync_commit(5, 1))
        await engine.reached.wait()
        await weights.sync_discard(5, "no answer in time")
        following = asyncio.ensure_future(weights.sync_prepare(6))
        engine.go_on.set()
        with pytest.raises(SyncError, match="cannot commit epoch 5"):
            await commit
        await following
        assert weights.state is EngineState.DISCARDED and weights.version is None
        with pytest.raises(NotServing):
            weights.check_serving()
        assert ("resume" in engine.calls) == (step == "resume"), "frozen requests stay frozen"
        await weights.sync_commit(6, 2)                      # the next sync heals it
        weights.check_serving()
        assert weights.version == 2

    asyncio.run(asyncio.wait_for(story(), patient(20)))


@pytest.mark.parametrize("in_flight", ["keep", "drain", "abort"])
def test_a_commit_that_others_did_not_make_is_taken_back(in_flight):
    """Requests wait frozen for the sync that heals the engine, and nothing spins until then."""
    async def story() -> None:
        engine = SlowEngine("nowhere")
        engine.unfinished = 0
        weights = EngineWeights(engine, 0, 1, "float32", None, "in_place", in_flight)
        await weights.sync_prepare(5)
        await weights.sync_commit(5, 1)
        engine.unfinished, engine.calls[:] = 1, []
        await weights.sync_discard(5, "engine 1 did not commit")
        assert weights.state is EngineState.DISCARDED and engine.calls == ["freeze", "sync_leave"]
        waiting = asyncio.ensure_future(weights.until_serving())
        await weights.sync_prepare(6)
        assert not waiting.done()
        await weights.sync_commit(6, 2)
        await waiting
        assert weights.version == 2 and engine.calls.count("freeze") == engine.calls.count("resume") == 1

    asyncio.run(asyncio.wait_for(story(), patient(20)))


def test_an_epoch_that_fails_before_the_transfer_leaves_the_old_version_served():
    """Another engine died at PREPARE: nothing was written in place yet."""
    async def story() -> None:
        engine = SlowEngine("nowhere")
        weights = EngineWeights(engine, 0, 1, "float32", None, "in_place")
        await weights.sync_prepare(5)
        await weights.sync_discard(5, "engine 1 died")
        assert weights.state is EngineState.DISCARDED, "there is no old version"
        await weights.sync_prepare(6)
        await weights.sync_commit(6, 1)

        await weights.sync_prepare(7)
        with pytest.raises(NotServing, match="updating"):
            weights.check_serving()
        await weights.sync_discard(7, "engine 1 died")
        weights.check_serving()
        assert weights.version == 1 and engine.calls[-2:] == ["sync_leave", "resume"]

    asyncio.run(asyncio.wait_for(story(), patient(20)))


def test_a_swap_that_had_not_begun_leaves_the_old_version_served():
    """The epoch is discarded while running requests are being frozen for it: they go on."""
    async def story() -> None:
        engine = SlowEngine("freeze")
        engine.go_on.set()
        weights = EngineWeights(engine, 0, 1, "float32", None, "shadow")
        await weights.sync_prepare(4)
        await weights.sync_commit(4, 0)
        engine.reached.clear(), engine.go_on.clear(), engine.calls.clear()

        await weights.sync_prepare(5)
        weights.check_serving()
        commit = asyncio.ensure_future(weights.sync_commit(5, 1))
        await engine.reached.wait()
        with pytest.raises(NotServing, match="updating"):
            weights.check_serving()
        await weights.sync_discard(5, "no answer in time")
        engine.go_on.set()
        with pytest.raises(SyncError, match="cannot commit epoch 5"):
            await commit
        weights.check_serving()
        assert weights.version == 0 and "sync_swap" not in engine.calls and engine.calls[-1] == "resume"

    asyncio.run(asyncio.wait_for(story(), patient(20)))


def test_requests_that_are_not_drained_in_time_cost_the_swap_and_not_the_old_version():
    async def story() -> None:
        engine = SlowEngine("nowhere")
        weights = EngineWeights(engine, 0, 1, "float32", None, "shadow", "drain", timeout_s=0.02)
        await weights.sync_prepare(4)
        engine.unfinished = 0
        await weights.sync_commit(4, 0)

        engine.unfinished = 1
        await weights.sync_prepare(5)
        with pytest.raises(SyncError, match="still runs 1 requests"):
            await weights.sync_commit(5, 1)
        weights.check_serving()
        await asyncio.wait_for(weights.until_serving(), 1)
        await weights.sync_discard(5, "the commit failed")
        weights.check_serving()
        assert weights.version == 0 and engine.calls.count("sync_swap") == 1

        engine.unfinished = 0
        await weights.sync_prepare(6)
        await weights.sync_commit(6, 2)
        assert weights.version == 2

    asyncio.run(asyncio.wait_for(story(), patient(20)))
