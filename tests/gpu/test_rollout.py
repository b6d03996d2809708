"""vLLM on the same GPU as a trainer's shard: traced layout, buckets packed and unpacked on the device, log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from launch import envvars
from launch.config.resolved import ResolvedConfig
from launch.model.hf_config import from_hf_config
from launch.plan.plan import Plan
from launch.planner.from_config import plan_of
from megatron_rl.layouts.digest import add, digest_layouts
from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
from megatron_rl.rollout.arguments import engine_arguments
from megatron_rl.rollout.engine import RolloutEngine
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.stores import tcp_store
from megatron_rl.weight_sync.ends.sender import WeightSender
from megatron_rl.weight_sync.plan.coverage import prove_coverage
from megatron_rl.weight_sync.plan.manifest import build_manifest
from megatron_rl.weight_sync.wire.packing import buffer_bytes, pack_bucket, source_tiles
from megatron_rl.weight_sync.wire.transport import nccl_group
from tests.ranks import free_port
from tests.rollout.engines import hf_logprobs, hf_model, local_placement, make_prompts, run_config
from tests.tiny_models import make_tiny

EPOCH, VERSION = 1, 1


@contextmanager
def _engine(config: ResolvedConfig, made: Plan, log: Path) -> Iterator[tuple[asyncio.Runner, RolloutEngine]]:
    """A started engine of the plan's device whose worker takes buckets from an RPC."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        for name, value in envvars.environment("rollout", made.device, config, job="tests", gpus=(0,)).items():
            patch.setenv(name, value)
        patch.setattr("megatron_rl.rollout.engine.engine_arguments", lambda *given: engine_arguments(*given) | {
            "worker_extension_cls": "tests.gpu.loopback.LoopbackWorker"})
        engine = runner.run(RolloutEngine.start(config, made, local_placement(made), 0, log))
        try:
            yield runner, engine
        finally:
            runner.run(engine.stop())


def assert_serves_the_weights_of_a_trainer(base: Path, device: Literal["cpu", "gpu"]) -> None:
    """Layout traced on the device, every bucket packed and unpacked there, digests equal, and the log-probs of what
    the engine then samples are Hugging Face's with the same (bf16) weights."""
    folder = make_tiny(base / "model", "qwen2", dtype=torch.bfloat16)
    config = run_config(folder, trainer={"dtype": "bf16"}, dtype="bf16", memory_utilization=0.15)
    architecture = from_hf_config(folder)
    made = plan_of(config, architecture, device)
    on = torch.device("cuda:0" if device == "gpu" else "cpu")
    canonical = canonical_tensors(architecture)
    layouts = megatron_layout(architecture, made.training, 0, "transformer_engine")
    parameters = {layout.name: torch.zeros(layout.shape, dtype=torch.bfloat16, device=on) for layout in layouts}
    with CheckpointReader(folder) as reader:
        load_layout(reader, canonical, layouts, parameters)

    with _engine(config, made, base / "engine.log") as (runner, engine):
        source = WeightSender(made.training.ranks[0], layouts, parameters).sync_describe()
        destinations = runner.run(engine.weights.sync_describe(canonical))
        manifest = build_manifest([source], destinations, 60_000)
        prove_coverage(manifest, [source], destinations)
        (edge,) = manifest.edges
        buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8, device=on)
        messages = [pack_bucket(bucket, number, EPOCH, parameters, buffer).cpu().numpy().tobytes()
                    for number, bucket in enumerate(edge.buckets)]
        assert len(messages) > 3
        runner.run(engine.weights.sync_prepare(EPOCH))
        plain = [bucket.encode() for bucket in edge.buckets]
        (digest,) = runner.run(engine._vllm.rpc("sync_unpack", plain, messages, EPOCH))
        assert digest == add(*(digest_layouts(source_tiles(bucket), parameters) for bucket in edge.buckets))
        runner.run(engine.weights.sync_commit(EPOCH, VERSION))

        sampling = Sampling(n=4, temperature=1.0, max_new_tokens=12)
        groups = runner.run(engine.generate(make_prompts(4), sampling, 0))
    model, differences = hf_model(folder), []
    for group in groups:
        for completion in group.trajectories:
            truth_R = hf_logprobs(model, group.prompt, completion.token_ids.tolist(), 1.0)
            differences.append(np.abs(completion.logprobs - truth_R))
            assert set(completion.weight_versions.tolist()) == {VERSION}
    assert np.concatenate(differences).mean() < 0.05


@pytest.mark.gpu
def test_engine_serves_what_a_trainer_on_the_same_gpu_packed(tmp_path) -> None:
    assert_serves_the_weights_of_a_trainer(tmp_path, "gpu")


@pytest.mark.gpu
def test_an_nccl_communicator_connects_and_aborts() -> None:
    """One member only: NCCL refuses two ranks on one GPU, so bytes between ranks are covered nowhere."""
    device = torch.device("cuda:0")
    store = tcp_store("127.0.0.1", free_port(), host=True, timeout=timedelta(seconds=60))
    group = nccl_group(store, 0, 1, device)
    assert (group.rank(), group.size()) == (0, 1)
    group.abort()


@pytest.mark.gpu
def test_bytes_sent_to_oneself_over_nccl_arrive() -> None:
    """All that one GPU can carry: a send and its receive, begun together."""
    device = torch.device("cuda:0")
    store = tcp_store("127.0.0.1", free_port(), host=True, timeout=timedelta(seconds=60))
    group = nccl_group(store, 0, 1, device)
    sent = torch.arange(1 << 20, device=device).to(torch.uint8)
    received = torch.zeros_like(sent)
    group._start_coalescing()
    group.send([sent], 0, 0)
    group.recv([received], 0, 0)
    group._end_coalescing().wait()
    torch.cuda.synchronize(device)
    assert torch.equal(sent, received)
    group.abort()
