"""A real vLLM engine generates while it receives the next version into a second copy of its weights."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.protocol import SyncError
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
from tests.weight_sync.sources import coordinator_of, source_ranks

TOKENS = 12
PROMPTS = make_prompts(3, length=70)
"""Longer than two blocks of the cache, so that it holds something to go stale."""


def test_requests_are_answered_by_the_old_version_until_the_swap_and_by_the_new_one_after(tmp_path):
    """Tied embeddings, a padded vocabulary. Greedy tokens are Hugging Face's for the version that they are tagged
    with."""
    folders = [make_tiny(tmp_path / name, "qwen2", seed, vocab_size=321, tie_word_embeddings=True)
               for seed, name in enumerate(("first", "second"))]
    config = run_config(folders[0], max_prompt_tokens=80, max_new_tokens=200, staging="shadow")
    models = [hf_model(folder) for folder in folders]
    released = tmp_path / "released"

    async def story(engine, source) -> None:
        coordinator = coordinator_of([source], [engine.weights], folders[0], patient(30))

        async def generate(tokens: int = TOKENS):
            sampling = Sampling(1, 0.0, tokens)
            groups = await asyncio.gather(*[engine.generate_group(prompt, sampling) for prompt in PROMPTS])
            return [group.trajectories[0] for group in groups]

        async def assert_serves(which: int, version: int) -> None:
            for prompt, completion in zip(PROMPTS, await generate(), strict=True):
                assert completion.token_ids.tolist() == hf_greedy(models[which], prompt, TOKENS)
                assert set(completion.weight_versions.tolist()) == {version}

        await coordinator.setup()
        await coordinator.sync(1)
        await source.call("load", str(folders[1]))

        await source.call("set_fault", "flip")
        with pytest.raises(SyncError, match="trainer rank 0 -> engine 0 worker"):
            await coordinator.sync(2)
        await source.call("set_fault", None)
        await assert_serves(0, 1)                                   # and the next sync goes over new lanes

        await source.call("strike", "hold", 3, str(released))
        syncing = asyncio.ensure_future(coordinator.sync(2))
        while not all(status.get("running") for status in await engine.weights._vllm.rpc("sync_status")):
            await asyncio.sleep(0.01)
        for _ in range(2):
            await assert_serves(0, 1)
        assert not syncing.done()
        spanning = asyncio.ensure_future(generate(200))
        while engine.status()["unfinished"] < len(PROMPTS):
            await asyncio.sleep(0.001)
        released.touch()
        report = await syncing
        assert 0 < report.seconds["pause"] <= report.seconds["commit"] < report.seconds["total"]
        await assert_serves(1, 2)
        for prompt, completion in zip(PROMPTS, await spanning, strict=True):
            assert_goes_on_with_the_new_weights(prompt, completion, models, TOKENS)
        coordinator.close()

    with (source_ranks(folders[0], run_plan(config).training) as (source,),
          running_engine(config, tmp_path / "engine.log") as (runner, engine)):
        runner.run(asyncio.wait_for(story(engine, source), patient(120)))
