"""Trainer TP x PP to rollout TP as real processes on real gloo lanes, through the coordinator: every pair of layouts
whose ranks and workers together are at most eight."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest
import torch

from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.digest import add
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.sync_bench.members import together
from megatron_rl.weight_sync.protocol import EngineState, SyncError
from tests.patience import patient
from tests.tiny_models import make_tiny
from tests.weight_sync.members import processes_of
from tests.weight_sync.receivers import ReceivingEngine
from tests.weight_sync.sources import coordinator_of, source_ranks
from tests.weight_sync.worlds import training_plan

MODELS = {
    # 321 tokens: padded by both sides, to different sizes. Two KV heads: repeated by a rollout of TP 4.
    # Tied embeddings travel from the first stage only. A trainer of TP 4 needs four KV heads.
    "two KV heads": ("qwen2", dict(num_key_value_heads=2)),
    "four KV heads": ("qwen3", dict(num_key_value_heads=4, tie_word_embeddings=True)),
}
LAYOUTS = [(tp, pp, rollout_tp) for tp, pp, rollout_tp in product((1, 2, 4), repeat=3) if tp * pp + rollout_tp <= 8]
CASES = [("two KV heads" if tp < 4 and (pp, rollout_tp) != (4, 4) else "four KV heads", tp, pp, rollout_tp)
         for tp, pp, rollout_tp in LAYOUTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model -> two checkpoints of it: before and after an update."""
    return {key: [make_tiny(tmp_path_factory.mktemp("matrix") / "model", family, seed, vocab_size=321,
                            num_hidden_layers=4, hidden_size=64, intermediate_size=128, **sizes) for seed in (0, 1)]
            for key, (family, sizes) in MODELS.items()}


@pytest.fixture(scope="module")
def members():
    with processes_of("tests.weight_sync.receivers:RebuiltWorker", [()] * 4) as members:
        yield members


@pytest.mark.parametrize("key, tp, pp, rollout_tp", CASES)
def test_live_parameters_are_what_vllm_loads_itself(folders, members, key, tp, pp, rollout_tp):
    """Bit for bit, padding included, at version 0 and again after every source's weights changed."""
    first, second = folders[key]
    a = from_hf_config(first)
    with source_ranks(first, training_plan(a, tp, pp)) as sources:
        asyncio.run(_sync_twice(sources, members[:rollout_tp], first, second))


@pytest.mark.parametrize("route", ["chain", "tree"])
def test_engines_that_pass_buckets_on_hold_what_vllm_loads_itself(folders, members, route):
    """Four engines of TP 1 behind a trainer of TP2 x PP2, each running the plug-in over vLLM's model."""
    first, second = folders["two KV heads"]
    a = from_hf_config(first)
    with source_ranks(first, training_plan(a, 2, 2)) as sources:
        asyncio.run(_sync_twice(sources, members, first, second, route, engines=4))


def test_what_is_swapped_in_is_what_vllm_loads_itself(folders, members):
    """Received into a second copy, at TP 2: tied embeddings and a padded vocabulary."""
    first, second = folders["four KV heads"]
    a = from_hf_config(first)
    with source_ranks(first, training_plan(a, 1, 2)) as sources:
        asyncio.run(_sync_twice(sources, members[:2], first, second, staging="shadow"))


def test_quantised_engines_hold_what_vllm_quantises_itself(tmp_path, members):
    """A bf16 trainer, an engine of TP2 in `fp8_per_channel`: three syncs, damage, and a layer that cannot be quantised;
    with either staging."""
    folders = [make_tiny(tmp_path / str(seed), "qwen2", seed, vocab_size=321, dtype=torch.bfloat16) for seed in (0, 1)]
    a = from_hf_config(folders[0])

    async def story(sources, staging) -> None:
        await together(member.call("build", str(folders[0]), 2, worker, staging, "fp8_per_channel")
                       for worker, member in enumerate(members[:2]))
        engine = ReceivingEngine(members[:2], 0, staging, "bfloat16")
        coordinator = coordinator_of(sources, [engine], folders[0], patient(30), bucket_bytes=30_000)

        async def hold(folder, quantised: bool, others: bool) -> list:
            """Whether the quantised tensors, and all others, are those of a checkpoint; the addresses of all."""
            found = await engine.rpc("unlike_own_loading", str(folder))
            assert [(not wrong, not rest) for wrong, rest, _ in found] == [(quantised, others)] * 2
            return [addresses for _, _, addresses in found]

        async def train_to(which: int) -> None:
            for source in sources:
                await source.call("load", str(folders[which]))

        manifest = await coordinator.setup()
        matrices = [f"model.layers.{layer}.{name}.weight" for layer in range(a.layers) for name in (
            "mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj")]
        assert manifest.requantised == tuple(sorted(matrices))
        addresses = await hold(folders[0], False, False)
        for version, which in enumerate((0, 1, 0)):
            await train_to(which)
            report = await coordinator.sync(version)
            assert report.requantised == 2 * sum(
                torch.Size(shape).numel() for name, shape in _matrices(a)) < report.nbytes == manifest.total_bytes
            assert await hold(folders[which], True, True) == addresses

        await train_to(1)
        await sources[0].call("set_fault", "flip")
        with pytest.raises(SyncError, match="trainer rank 0 -> engine 0 worker"):
            await coordinator.sync(3)
        await sources[0].call("set_fault", None)
        await hold(folders[0], True, staging == "shadow")       # no layer was quantised again
        assert engine.state is (EngineState.SERVING if staging == "shadow" else EngineState.DISCARDED)

        await engine.rpc("fail_quantising", 3)
        with pytest.raises(SyncError, match="engine 0 worker 0: ZeroDivisionError"):
            await coordinator.sync(3)
        assert (engine.state, engine.version) == (EngineState.DISCARDED, None)
        assert await hold(folders[1], False, True) == addresses
        await engine.rpc("fail_quantising", -1)
        await coordinator.sync(3)
        assert (engine.state, engine.version) == (EngineState.SERVING, 3)
        assert await hold(folders[1], True, True) == addresses
        coordinator.close()

    async def stories(sources) -> None:
        for staging in ("in_place", "shadow"):
            await story(sources, staging)

    with source_ranks(folders[0], training_plan(a), "bfloat16") as sources:
        asyncio.run(stories(sources))


def _matrices(a) -> list:
    return [(each.name, each.shape) for each in canonical_tensors(a) if each.name.endswith("_proj.weight")]


async def _sync_twice(sources, members, first, second, route="direct", engines=1, staging="in_place") -> None:
    tp = len(members) // engines
    await together(member.call("build", str(first), tp, number % tp, staging)
                   for number, member in enumerate(members))
    made = [ReceivingEngine(members[replica * tp:(replica + 1) * tp], replica, staging)
            for replica in range(engines)]
    coordinator = coordinator_of(sources, made, first, patient(30), bucket_bytes=30_000, route=route)
    manifest = await coordinator.setup()
    assert {(edge.replica, edge.worker) for edge in manifest.edges} == set(product(range(engines), range(tp)))
    assert any(hop.sender for stream in manifest.streams for hop in stream.hops) == (engines > 1)
    assert max(len(edge.buckets) for edge in manifest.edges) > 1, "nothing was cut"
    for version, folder in enumerate((first, second)):
        for source in sources:
            await source.call("load", str(folder))
        report = await coordinator.sync(version)
        assert report.nbytes == manifest.total_bytes
        for engine in made:
            assert (engine.state, engine.version) == (EngineState.SERVING, version)
            statuses = await engine.rpc("sync_status")
            for worker, (compared, wrong, digest) in enumerate(await engine.rpc("differences", str(folder))):
                assert compared > 30 and wrong == [], f"worker {worker}: {wrong}"
                assert add(*(value for _, value in statuses[worker]["digests"])) == digest
    coordinator.close()
