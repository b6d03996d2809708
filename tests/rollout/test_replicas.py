"""Two real engines behind the scheduler: both serve, results by prompt, deterministic mode repeats on either."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.config.resolved import ResolvedConfig
from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.rollout.scheduler import RolloutScheduler
from megatron_rl.weight_sync.coordinator import SyncCoordinator
from tests.patience import patient
from tests.rollout.engines import (
    VOCABULARY,
    engine_environment,
    hf_greedy,
    hf_model,
    local_placement,
    make_prompts,
    run_config,
    run_plan,
)
from tests.tiny_models import make_tiny
from tests.weight_sync.sources import endpoints, source_ranks

PROMPTS = make_prompts(10)
SAMPLED = Sampling(n=8, temperature=1.0, max_new_tokens=20)


class _Replica:
    """An engine that lives on an event loop and a thread of its own; its methods answer with awaitables on any loop,
    as those of an actor do."""

    def __init__(self, config: ResolvedConfig, number: int) -> None:
        made = run_plan(config)
        self._thread = ThreadPoolExecutor(1)
        self._loop = asyncio.new_event_loop()
        self._thread.submit(self._loop.run_forever)
        starting = RolloutEngine.start(config, made, local_placement(made), number)
        self._starting = asyncio.run_coroutine_threadsafe(starting, self._loop)

    async def start(self) -> None:
        self._engine = await asyncio.wrap_future(self._starting)

    def __getattr__(self, method: str):
        def call(*args, **kwargs):
            on = self._engine.weights if method.startswith("sync_") else self._engine
            running = asyncio.run_coroutine_threadsafe(getattr(on, method)(*args, **kwargs), self._loop)
            return asyncio.wrap_future(running)

        return call

    def close(self) -> Future:
        """End the engine, then its event loop; the thread ends with it."""
        stopping = asyncio.run_coroutine_threadsafe(self._engine.stop(), self._loop)
        stopping.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        self._thread.shutdown(wait=False)
        return stopping


async def _started(config: ResolvedConfig, folder: Path, sources: list, stack: ExitStack) -> list[_Replica]:
    replicas = [_Replica(config, number) for number in range(2)]
    stack.callback(lambda: [closing.result(60) for closing in [replica.close() for replica in replicas]])
    await asyncio.gather(*[replica.start() for replica in replicas])
    canonical = canonical_tensors(from_hf_config(folder))
    coordinator = SyncCoordinator(sources, replicas, endpoints(len(sources)), canonical, backend="gloo",
                                  bucket_bytes=1 << 20, timeout_s=patient(30))
    await coordinator.setup()
    await coordinator.sync(0)
    return replicas


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=321)


@pytest.fixture(scope="module")
def pair(folder):
    """(event loop, two engines that hold version 0)."""
    config = run_config(folder, deterministic=True, replicas=2, max_new_tokens=20)
    with (source_ranks(folder, run_plan(config).training) as sources, engine_environment(config),
          asyncio.Runner() as runner, ExitStack() as stack):
        yield runner, runner.run(_started(config, folder, sources, stack))


def _rollout(pair, sampling, *, deterministic, backwards=False, step=0, max_num_seqs=64):
    runner, engines = pair
    scheduler = RolloutScheduler(engines[::-1] if backwards else engines, max_num_seqs=max_num_seqs,
                                 vocabulary=VOCABULARY, deterministic=deterministic)
    scheduler.committed(0)
    return scheduler, runner.run(scheduler.rollout(PROMPTS, sampling, step))


def _content(groups) -> list:
    return [(c.token_ids.tolist(), c.logprobs.tobytes(), c.finish_reason) for g in groups for c in g.trajectories]


def test_groups_are_spread_by_load_and_come_back_by_prompt(pair, folder):
    """At most two groups of an engine at once: the others wait in the scheduler for room."""
    scheduler, groups = _rollout(pair, Sampling(1, 0.0, 12), deterministic=False, max_num_seqs=2)
    assert [group.prompt.index for group in groups] == list(range(10))
    model = hf_model(folder)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        expected = hf_greedy(model, prompt, 12)
        assert group.trajectories[0].token_ids.tolist() == expected
    assert {group.engine for group in groups} == {0, 1}
    served = [sum(group.engine == engine for group in groups) for engine in (0, 1)]
    assert [each["groups"] for each in scheduler.served().values()] == served


def test_engines_draw_on_their_own(pair):
    """Two replicas with one seed would sample the same answers twice."""
    runner, engines = pair
    drawn = runner.run(_both(engines))
    assert _content(drawn[:1]) != _content(drawn[1:])


async def _both(engines):
    return await asyncio.gather(*[engine.generate_group(PROMPTS[0], SAMPLED) for engine in engines])


def test_deterministic_rollouts_repeat_bit_for_bit_on_either_engine(pair):
    """After other work, and with the engines' shares exchanged: the other engine has another seed and history."""
    _, first = _rollout(pair, SAMPLED, deterministic=True)
    _rollout(pair, SAMPLED, deterministic=False)
    assert [group.engine for group in first] == [0, 1] * 5
    _, again = _rollout(pair, SAMPLED, deterministic=True)
    assert _content(again) == _content(first)
    _, exchanged = _rollout(pair, SAMPLED, deterministic=True, backwards=True)
    assert [group.engine for group in exchanged] == [1, 0] * 5
    assert _content(exchanged) == _content(first)
    _, other = _rollout(pair, SAMPLED, deterministic=True, step=1)
    assert _content(other) != _content(first)
