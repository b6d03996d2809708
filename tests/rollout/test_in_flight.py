"""Requests that run when a real engine stops for a sync: frozen, waited for, or ended and asked again."""

from __future__ import annotations

import asyncio

import pytest

from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.protocol import NotServing, SyncError
from tests.patience import patient
from tests.rollout.engines import (
    assert_goes_on_with_the_new_weights,
    hf_greedy,
    hf_model,
    make_prompts,
    run_config,
    run_plan,
    running_engine,
)
from tests.tiny_models import make_tiny
from tests.weight_sync.sources import endpoints, source_ranks

PROMPTS = make_prompts(3, length=70)
LONG, COMPARED = 160, 12


class Story:
    """An engine and its trainer, which holds the first or the second of two models."""

    def __init__(self, folders, engine: RolloutEngine, source) -> None:
        self.models = [hf_model(folder) for folder in folders]
        self.engine, self._source, self._folders = engine, source, folders
        self._coordinator = SyncCoordinator(
            [source], [engine.weights], endpoints(1), canonical_tensors(from_hf_config(folders[0])), backend="gloo",
            bucket_bytes=60_000, timeout_s=patient(30), address="127.0.0.1")
        self._version = 0

    async def begin(self) -> None:
        """The first model is served as version 1."""
        if not self._version:
            await self._coordinator.setup()
        await self.sync(0)

    async def sync(self, which: int) -> int:
        await self._source.call("load", str(self._folders[which]))
        self._version += 1
        await self._coordinator.sync(self._version)
        return self._version

    async def running(self):
        """Three long greedy requests, all of them under way."""
        task = asyncio.ensure_future(asyncio.gather(*[
            self.engine.generate_group(prompt, Sampling(1, 0.0, LONG)) for prompt in PROMPTS]))
        began = self.engine.status()["generated_tokens"]
        while self.engine.status()["generated_tokens"] < began + 3 * len(PROMPTS):
            await asyncio.sleep(0.001)
        return task


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    base = tmp_path_factory.mktemp("in-flight")
    folders = [make_tiny(base / name, "qwen2", seed, vocab_size=321) for seed, name in enumerate(("first", "second"))]
    config = run_config(folders[0], max_prompt_tokens=80, max_new_tokens=LONG)
    with (source_ranks(folders[0], run_plan(config).training) as (source,),
          running_engine(config, base / "engine.log") as (runner, engine)):
        yield runner, Story(folders, engine, source)


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_requests_go_on_with_the_new_weights(story, in_flight):
    runner, at = story
    at.engine.weights.in_flight = in_flight

    async def over_a_sync():
        await at.begin()
        old, ended = at._version, await at.engine.ended(0)
        task = await at.running()
        new = await at.sync(1)
        assert await at.engine.ended(0) <= ended, "an aborted sequence goes on: it has not ended"
        assert await at.engine.ended(ended + len(PROMPTS)) == ended + len(PROMPTS)
        return [group.trajectories[0] for group in await task], old, new

    completions, old, new = runner.run(asyncio.wait_for(over_a_sync(), patient(100)))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.finish_reason in ("length", "stop") and len(completion.logprobs) == len(completion.token_ids)
        completion.weight_versions[:] -= old - 1        # as versions 1 and 2
        assert new == old + 1
        assert_goes_on_with_the_new_weights(prompt, completion, at.models, COMPARED)
        assert completion.text == at.engine._template.decode(completion.token_ids)


def test_requests_are_waited_for_and_new_ones_are_refused_meanwhile(story):
    runner, at = story
    at.engine.weights.in_flight = "drain"

    async def over_a_sync():
        await at.begin()
        old = at._version
        task = await at.running()
        syncing = asyncio.ensure_future(at.sync(1))
        while at.engine.status()["state"] == "serving":
            await asyncio.sleep(0.001)
        assert not task.done(), "nothing was left to wait for"
        with pytest.raises(NotServing):
            await at.engine.generate_group(PROMPTS[0], Sampling(1, 0.0, 1))
        await syncing
        return [group.trajectories[0] for group in await task], old

    completions, old = runner.run(asyncio.wait_for(over_a_sync(), patient(100)))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert set(completion.weight_versions.tolist()) == {old}
        assert completion.token_ids[:COMPARED].tolist() == hf_greedy(at.models[0], prompt, COMPARED)


def test_requests_that_do_not_end_in_time_fail_the_sync_and_are_counted(story):
    runner, at = story
    at.engine.weights.in_flight, at.engine.weights._timeout_s = "drain", 0.02

    async def over_a_sync():
        await at.begin()
        task = await at.running()
        try:
            with pytest.raises(SyncError, match="engine 0 still runs 3 requests 0.01 s after.*keep or abort"):
                await at.sync(1)
        finally:
            at.engine.weights._timeout_s = 30.0
        await task
        await at.sync(1)                                # heals it

    runner.run(asyncio.wait_for(over_a_sync(), patient(100)))
