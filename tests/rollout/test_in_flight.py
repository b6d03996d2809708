"""Requests that run when a real engine stops for a sync: frozen, waited for, or ended and asked again."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from launch.model.hf_config import from_hf_config
from megatron_rl.data.batch import Prompt, Trajectory
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.protocol import NotServing, SyncError
from tests.patience import patient
from tests.rollout.engines import (
    assert_goes_on_with_the_new_weights,
    hf_greedy,
    hf_logprobs,
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


def test_running_requests_keep_their_cache_and_new_ones_take_none_of_older_weights(story):
    """`keep_kv`: a request that runs over the swap reads the first model's keys and values of what the first model
    processed. A new request for the same prompt finds nothing in the cache, and its log-probs are the second model's.
    The next one finds the blocks of the second model."""
    runner, at = story
    at.engine.weights.in_flight, at.engine.weights.keep_kv = "keep", True

    async def over_a_sync():
        await at.begin()
        before = [await _cached_and_logprobs(at.engine, PROMPTS[0]) for _ in range(2)]
        old = at._version
        task = await at.running()
        await at.sync(1)
        after = [await _cached_and_logprobs(at.engine, PROMPTS[0]) for _ in range(2)]
        return before, after, [group.trajectories[0] for group in await task], old

    try:
        before, after, completions, old = runner.run(asyncio.wait_for(over_a_sync(), patient(100)))
    finally:
        at.engine.weights.keep_kv = False
    blocks = len(PROMPTS[0].token_ids) // 32 * 32           # vLLM caches whole blocks
    assert [cached for cached, *_ in before] == [0, blocks], "the cache works within a version"
    assert [cached for cached, *_ in after] == [0, blocks], "a new request reads blocks of older weights"
    for model, answers in zip(at.models, (before, after), strict=True):
        for _, tokens, logprobs in answers:
            np.testing.assert_allclose(logprobs, hf_logprobs(model, PROMPTS[0], tokens, 1.0), atol=1e-4)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        versions = completion.weight_versions.tolist()
        assert set(versions) == {old, old + 1}
        np.testing.assert_allclose(completion.logprobs, _with_kept_cache(at.models, prompt, completion, old), atol=1e-4)


async def _cached_and_logprobs(engine: RolloutEngine, prompt: Prompt) -> tuple[int, list[int], np.ndarray]:
    """A greedy request: its prompt tokens in the prefix cache, the tokens that it sampled, their log-probs."""
    async with engine.weights.admission():
        queue = await engine._enqueue(prompt, Sampling(1, 0.0, COMPARED), None)
    output = await engine._vllm.finished(queue)
    (completion,) = output.outputs
    return output.num_cached_tokens, list(completion.token_ids), np.array(completion.logprobs.logprobs)


@torch.no_grad()
def _with_kept_cache(models, prompt: Prompt, completion: Trajectory, old: int) -> np.ndarray:
    """Hugging Face's log-probs if the second model goes on with the first one's keys and values. The first model
    processed everything before its last token, which only the second one reads."""
    tokens = completion.token_ids.tolist()
    ids = torch.tensor([[*prompt.token_ids.tolist(), *tokens]])
    swap = len(prompt.token_ids) + completion.weight_versions.tolist().count(old) - 1
    first = models[0](ids[:, :swap], use_cache=True)
    second = models[1](ids[:, swap:], past_key_values=first.past_key_values)
    logits_TV = torch.cat([first.logits, second.logits], dim=1)[0, len(prompt.token_ids) - 1:-1]
    return logits_TV.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()


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
