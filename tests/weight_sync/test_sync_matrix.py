"""Trainer TP x PP to rollout TP as real processes on real gloo lanes, through the coordinator: every pair of layouts
whose ranks and workers together are at most eight."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import product

import pytest
import torch

from launch.model.hf_config import from_hf_config
from launch.plan.layouts import RolloutLayout
from launch.planner.memory.rollout import layer_buffer_bytes, weights_on_rank
from megatron_rl.layouts.digest import add
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.sync_bench.members import MemberError, together
from megatron_rl.weight_sync.protocol import EngineState, NotServing, SyncError
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


@pytest.mark.parametrize("tp, pp, rollout_tp, engines, route", [(2, 2, 2, 2, "chain"), (2, 2, 1, 1, "direct")])
def test_quantised_engines_hold_what_vllm_quantises_itself(tmp_path, members, tp, pp, rollout_tp, engines, route):
    """A bf16 trainer, engines in `fp8_per_channel`: every layer from several streams, forwarded by the first engine;
    three syncs, damage, a lane that is cut, and a layer that cannot be quantised."""
    folders = [make_tiny(tmp_path / str(seed), "qwen2", seed, vocab_size=321, num_hidden_layers=4, dtype=torch.bfloat16)
               for seed in (0, 1)]
    a = from_hf_config(folders[0])
    workers = members[:rollout_tp * engines]

    async def story(sources) -> None:
        await together(member.call("build", str(folders[0]), rollout_tp, number % rollout_tp, "in_place",
                                   "fp8_per_channel") for number, member in enumerate(workers))
        made = [ReceivingEngine(workers[replica * rollout_tp:(replica + 1) * rollout_tp], replica, dtype="bfloat16")
                for replica in range(engines)]
        coordinator = coordinator_of(sources, made, folders[0], patient(30), bucket_bytes=30_000, route=route)

        async def hold(which: int) -> tuple[set[bool], set[bool], list]:
            """Whether the quantised tensors, and all others, are those of a checkpoint; the addresses of all."""
            found = [each for engine in made for each in await engine.rpc("unlike_own_loading", str(folders[which]))]
            return ({not wrong for wrong, _, _ in found}, {not rest for _, rest, _ in found},
                    [addresses for _, _, addresses in found])

        async def train_to(which: int) -> None:
            for source in sources:
                await source.call("load", str(folders[which]))

        async def fails(message: str) -> None:
            with pytest.raises(SyncError, match=message):
                await coordinator.sync(3)
            for engine in made:
                assert (engine.state, engine.version) == (EngineState.DISCARDED, None)
                with pytest.raises(NotServing):
                    engine.check_serving()

        manifest = await coordinator.setup()
        matrices = [f"model.layers.{layer}.{name}.weight" for layer in range(a.layers) for name in (
            "mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj")]
        assert manifest.requantised == tuple(sorted(matrices))
        quantised, others, addresses = await hold(0)
        assert quantised == others == {False}
        committed = {True}, {True}, addresses
        for version, which in enumerate((0, 1, 0)):
            await train_to(which)
            report = await coordinator.sync(version)
            assert report.requantised == engines * 2 * sum(
                torch.Size(shape).numel() for name, shape in _matrices(a)) < report.nbytes == manifest.total_bytes
            assert await hold(which) == committed
        for engine in made:
            _assert_planned(a, rollout_tp, await engine.rpc("memory"))

        await train_to(1)
        await sources[0].call("set_fault", "flip")
        await fails("trainer rank 0 -> engine 0 worker")
        await sources[0].call("set_fault", None)

        await train_to(0)
        await made[0].rpc("fail_quantising", 3)
        await fails("engine 0 worker 0: ZeroDivisionError")
        quantised, _, same = await hold(0)
        assert False in quantised and same == addresses
        await made[0].rpc("fail_quantising", -1)
        await coordinator.sync(3)
        assert await hold(0) == committed
        for engine in made:
            engine.check_serving()
        coordinator.close()

    with source_ranks(folders[0], training_plan(a, tp, pp), "bfloat16") as sources:
        asyncio.run(story(sources))


def test_a_second_copy_of_quantised_weights_is_refused(tmp_path, members):
    folder = make_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)
    with pytest.raises(MemberError, match="staging = shadow holds no second copy of quantised weights"):
        asyncio.run(members[0].call("build", str(folder), 1, 0, "shadow", "fp8_per_channel"))


def _assert_planned(a, tp: int, memory: list) -> None:
    """The memory of weights and buffers is what the planner counts for this model, and less than a bf16 engine's."""
    layout = RolloutLayout(tp=tp, weight_precision="fp8")
    for weights, buffers in memory:
        assert weights == weights_on_rank(a, layout)
        count, rest = divmod(buffers, layer_buffer_bytes(a, layout))
        assert rest == 0 < count < 6
        assert weights + buffers < weights_on_rank(a, replace(layout, weight_precision="bf16"))


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
