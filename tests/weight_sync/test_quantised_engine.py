"""A real vLLM engine in fp8 answers as one that loaded and quantised the same weights itself."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.layouts import step_folder as files
from megatron_rl.layouts.disk_check import digests_of_files
from megatron_rl.rollout.sampling import Sampling
from megatron_rl.weight_sync.protocol import NotServing, SyncError
from tests.patience import patient
from tests.rollout.engines import make_prompts, run_config, run_plan, running_engine
from tests.tiny_models import make_tiny
from tests.weight_sync.sources import coordinator_of, source_ranks

PROMPTS = make_prompts(3, length=40)


def test_answers_are_those_of_an_engine_that_loaded_and_quantised_the_weights_itself(tmp_path):
    """An engine of TP 2, whose ranks reduce scales. Greedy tokens and live tensors after two syncs, against vLLM's own
    loading of the second version from a disk; that engine proves what it loaded, and tells another version from it.
    Between the two syncs, one of the workers fails in the middle of a transfer."""
    folders = [make_tiny(tmp_path / name, "qwen2", seed, vocab_size=321, dtype=torch.bfloat16)
               for seed, name in enumerate(("first", "second"))]
    config = run_config(folders[0], tp=2, dtype="fp8", trainer={"dtype": "bf16"})
    names: list[str] = []

    async def state(engine) -> tuple[list, list]:
        groups = await asyncio.gather(*[engine.generate_group(each, Sampling(1, 0.0, 12)) for each in PROMPTS])
        return [group.trajectories[0].token_ids.tolist() for group in groups], await engine.weights._vllm.rpc(
            "sync_probe", names)

    async def synced(engine, source) -> tuple[list, list]:
        coordinator = coordinator_of([source], [engine.weights], folders[0], patient(60), bucket_bytes=30_000)
        manifest = await coordinator.setup()
        names.extend([*manifest.requantised, *(f"{name}_scale" for name in manifest.requantised),
                      "model.layers.1.self_attn.qkv_proj.bias", "model.norm.weight", "lm_head.weight"])
        await coordinator.sync(0)
        before = await state(engine)
        await source.call("load", str(folders[1]))
        await source.call("set_fault", "late")
        with pytest.raises(SyncError, match="engine 0 worker 0: WireError"):
            await coordinator.sync(1)
        with pytest.raises(NotServing):
            await engine.generate_group(PROMPTS[0], Sampling(1, 0.0, 12))
        await source.call("set_fault", None)
        await coordinator.sync(1)
        after = await state(engine)
        assert before[0] != after[0], "both versions answer alike"
        coordinator.close()
        return after

    with (source_ranks(folders[0], run_plan(config).training, "bfloat16") as (source,),
          running_engine(config, tmp_path / "engine.log") as (runner, engine)):
        ours = runner.run(asyncio.wait_for(synced(engine, source), patient(120)))

    version = files.checkpoint_folder(tmp_path, 1)
    shutil.copytree(folders[1], files.begin(version), dirs_exist_ok=True)
    held = digests_of_files(folders[1], load_file(folders[1] / "model.safetensors"))
    files.publish(version, {"version": 1, "digests": {name: f"{value:016x}" for name, value in held.items()}})
    with running_engine(config, tmp_path / "itself.log", version_folder=version) as (runner, engine):
        assert runner.run(state(engine)) == ours
        other = runner.run(engine.compare(folders[0]))
        assert any("down_proj.weight_scale: not what vLLM makes" in line for line in other)
