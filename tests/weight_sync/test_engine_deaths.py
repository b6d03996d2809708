"""Deaths in the middle of a sync with real vLLM engines: one that passes buckets on, and one that only receives. The
survivor serves the version that it claims, by Hugging Face's answers; an engine that is started again is healed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.vllm_engine import EngineDied
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from megatron_rl.weight_sync.protocol import NotServing
from tests.patience import patient
from tests.rollout.engines import (
    engine_environment,
    hf_greedy,
    hf_model,
    local_placement,
    make_prompts,
    run_config,
    run_plan,
)
from tests.weight_sync.routed import two_checkpoints
from tests.weight_sync.sources import coordinator_of, source_ranks

PROMPTS, TOKENS = make_prompts(2, length=40), 8


class Engines:
    """Engines of one run, by replica; all of them are ended at the end."""

    def __init__(self, config, logs: Path) -> None:
        self._config, self._plan, self._logs = config, run_plan(config), logs
        self.started: list[RolloutEngine] = []

    async def start(self, replica: int) -> RolloutEngine:
        engine = await RolloutEngine.start(self._config, self._plan, local_placement(self._plan), replica,
                                           self._logs / f"{len(self.started)}.log")
        self.started.append(engine)
        return engine

    async def stop(self) -> None:
        for engine in self.started:
            await engine.stop()


def kill(engine: RolloutEngine) -> None:
    """The engine core, in which the only worker lives."""
    (process,) = engine._vllm._llm.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGKILL)


async def assert_serves(engine: RolloutEngine, model, version: int) -> None:
    for prompt in PROMPTS:
        (completion,) = (await engine.generate_group(prompt, Sampling(1, 0.0, TOKENS))).trajectories
        assert completion.token_ids.tolist() == hf_greedy(model, prompt, TOKENS)
        assert set(completion.weight_versions.tolist()) == {version}


async def assert_gone(engine: RolloutEngine) -> None:
    with pytest.raises((EngineDied, NotServing)):
        await engine.generate_group(PROMPTS[0], Sampling(1, 0.0, 1))


@pytest.mark.slow
def test_a_forwarder_and_a_receiver_die_in_the_middle(tmp_path):
    folders = two_checkpoints(tmp_path)
    config = run_config(folders[0], replicas=2)
    models = [hf_model(folder) for folder in folders]

    async def sync_over(death, coordinator: SyncCoordinator, source, version: int):
        """A sync in which the source stops before its third bucket until `death` has struck."""
        holding, released = tmp_path / f"holding-{version}", tmp_path / f"released-{version}"
        await source.call("strike", "hold", 2, str(released), str(holding))
        syncing = asyncio.ensure_future(coordinator.sync(version))
        while not holding.exists():
            assert not syncing.done(), await syncing
            await asyncio.sleep(0.01)
        death()
        released.touch()
        return await syncing

    async def story(sources, engines: Engines) -> None:
        first, second = [await engines.start(replica) for replica in (0, 1)]
        coordinator = coordinator_of(sources, [first.weights, second.weights], folders[0], patient(60),
                                     bucket_bytes=30_000, route="chain")
        await coordinator.setup()
        await sources[0].call("load", str(folders[1]))
        await coordinator.sync(1)
        assert [len(stream.receivers_from((0, 0))) for stream in coordinator.manifest.streams] == [1], "it passes on"
        await sources[0].call("load", str(folders[0]))
        report = await sync_over(lambda: kill(first), coordinator, sources[0], 2)
        assert report.lost == ("engine 0",)
        await assert_serves(second, models[0], 2)
        await assert_gone(first)

        again = await engines.start(0)
        await coordinator.admit(0, again.weights)
        await assert_gone(again)            # it holds nothing yet
        await sources[0].call("strike", "none")
        await coordinator.sync(3)
        for engine in (again, second):
            await assert_serves(engine, models[0], 3)

        await sources[0].call("load", str(folders[1]))
        report = await sync_over(lambda: kill(second), coordinator, sources[0], 4)
        assert report.lost == ("engine 1",)
        await assert_serves(again, models[1], 4)
        coordinator.close()

    with (source_ranks(folders[0], run_plan(config).training) as sources, engine_environment(config),
          asyncio.Runner() as runner):
        engines = Engines(config, tmp_path)
        try:
            runner.run(asyncio.wait_for(story(sources, engines), patient(200)))
        finally:
            runner.run(engines.stop())
