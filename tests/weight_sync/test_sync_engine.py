"""A real vLLM engine at TP2 receives from four real source processes: in place, verified, fenced."""

from __future__ import annotations

import asyncio

import pytest

from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.protocol import EngineState, NotServing, SyncError
from tests.patience import patient
from tests.rollout.engines import hf_greedy, hf_model, make_prompts, run_config, run_plan, running_engine
from tests.tiny_models import make_tiny
from tests.weight_sync.sources import coordinator_of, source_ranks

GREEDY = Sampling(n=1, temperature=0.0, max_new_tokens=12)
PROMPTS = make_prompts(4, length=150)
"""Longer than a KV block (128 tokens on a CPU), so that the prefix cache holds something to go stale."""


class _World:
    """The engine, its sources and two checkpoints of one architecture, driven from one event loop."""

    def __init__(self, runner, engine, sources, folders) -> None:
        self.runner, self.engine, self.sources, self.folders = runner, engine, sources, folders
        self.models = [hf_model(folder) for folder in folders]
        self.version = 0
        self.coordinator = coordinator_of(sources, [engine.weights], folders[0], patient(10))

    def train_to(self, which: int) -> None:
        """Every source takes the weights of checkpoint `which`."""
        self.each("load", str(self.folders[which]))

    def each(self, method: str, *args) -> list:
        return self.runner.run(_gather([source.call(method, *args) for source in self.sources]))

    def sync(self):
        self.version += 1
        return self.runner.run(self.coordinator.sync(self.version))

    def generate(self):
        return self.runner.run(self.engine.generate(PROMPTS, GREEDY, 0))

    def assert_serves(self, which: int) -> None:
        """Greedy tokens are Hugging Face's with these weights, and carry the committed version."""
        for group in self.generate():
            (completion,) = group.trajectories
            assert completion.token_ids.tolist() == hf_greedy(self.models[which], group.prompt, 12)
            assert set(completion.weight_versions.tolist()) == {self.version}


async def _gather(calls):
    return await asyncio.gather(*calls)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    base = tmp_path_factory.mktemp("sync")
    folders = [make_tiny(base / name, "qwen2", seed, vocab_size=321) for seed, name in enumerate(("first", "second"))]
    config = run_config(folders[0], tp=2, trainer={"tp": 2, "pp": 2}, max_prompt_tokens=160)
    with (source_ranks(folders[0], run_plan(config).training) as sources,
          running_engine(config, base / "engine.log") as (runner, engine)):
        yield _World(runner, engine, sources, folders)


def test_nothing_is_served_before_version_0(world):
    with pytest.raises(NotServing, match="engine 0 is empty"):
        world.generate()
    world.runner.run(world.coordinator.setup())
    with pytest.raises(NotServing):
        world.generate()


def test_three_syncs_in_a_row_serve_the_new_weights(world):
    """Prompts repeat, so a stale prefix cache (NeMo-RL#4018, vllm#9744) would show as the old model's tokens."""
    for which in (0, 1, 0):
        world.train_to(which)
        report = world.sync()
        world.assert_serves(which)
        assert report.nbytes == world.coordinator.manifest.total_bytes
        assert world.engine.status()["version"] == world.version


def test_the_prefix_cache_works_within_a_version(world):
    """Else the three syncs above would prove nothing about it."""
    from vllm import SamplingParams

    async def cached() -> int:
        prompt = {"prompt_token_ids": PROMPTS[0].token_ids.tolist(), "cache_salt": str(world.coordinator.version)}
        async for output in world.engine._vllm._llm.generate(prompt, SamplingParams(max_tokens=1), "cached"):
            return output.num_cached_tokens

    world.generate()
    assert world.runner.run(cached()) >= 128


@pytest.mark.parametrize("fault", ["flip", "swap"])
def test_damage_on_the_wire_is_not_committed(world, fault):
    """One flipped bit, or two swapped rows (which an XOR hash cannot see): refused, then healed by a full sync."""
    before = world.coordinator.version
    world.train_to(1)
    world.runner.run(world.sources[1].call("set_fault", fault))
    with pytest.raises(SyncError, match="trainer rank 1 -> engine 0 worker") as caught:
        world.sync()
    assert "trainer rank 0" not in str(caught.value), "an edge without damage was blamed"
    assert world.engine.status()["state"] == EngineState.DISCARDED.value
    assert world.coordinator.version == before
    with pytest.raises(NotServing, match="(?s)discarded.*trainer rank 1"):
        world.generate()

    world.runner.run(world.sources[1].call("set_fault", None))
    world.sync()
    world.assert_serves(1)


def test_a_bucket_of_an_earlier_epoch_is_fenced(world):
    """The workers record it and report it; the executor survives; new lanes on the same ports heal the engine."""
    world.train_to(0)
    world.runner.run(world.sources[0].call("set_fault", "stale"))
    with pytest.raises(SyncError, match=r"engine 0 worker 0: (?s:.)*expected bucket 0 of epoch"):
        world.sync()
    with pytest.raises(NotServing):
        world.generate()

    world.runner.run(world.sources[0].call("set_fault", None))
    world.sync()
    world.assert_serves(0)


def test_a_version_never_goes_back(world):
    with pytest.raises(SyncError, match="does not follow"):
        world.runner.run(world.coordinator.sync(world.version))
    world.assert_serves(0)


def test_a_source_that_died_is_named(world):
    """The last test of this engine: one source process ends, the sync fails within its deadline."""
    world.sources[3].member._process.kill()
    world.sources[3].member._process.join()
    with pytest.raises(SyncError, match="trainer rank 3"):
        world.sync()
    with pytest.raises(NotServing):
        world.generate()
