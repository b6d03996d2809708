"""From Megatron's layouts to those traced from vLLM's own loaders: carried out, it equals vLLM's own loading."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import envvars
from launch.model.architecture import Architecture
from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.digest import add, digest_layouts, digest_tiles
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.layouts.vllm import trace_layout, write_padding
from megatron_rl.weight_sync.plan.copies import Destination
from megatron_rl.weight_sync.plan.coverage import prove_coverage
from megatron_rl.weight_sync.plan.manifest import build_manifest
from tests.ranks import Rank, run_ranks
from tests.rollout.engines import run_config
from tests.tiny_models import make_tiny
from tests.weight_sync.worlds import execute, megatron_shards, sources, training_plan

MODELS = {
    # 321 tokens: vLLM pads to 384. Two KV heads: fewer than TP 4.
    "llama, tied": ("llama", dict(tie_word_embeddings=True, vocab_size=321, num_key_value_heads=2)),
    "qwen2": ("qwen2", dict(vocab_size=320, num_key_value_heads=4)),
    "qwen3, wide heads": ("qwen3", dict(vocab_size=321, num_key_value_heads=2, head_dim=64)),
}
ROLLOUT_TP = (1, 2, 4)


def _trace(rank: Rank, folders: dict[str, str]) -> dict[str, dict[tuple[int, int], tuple]]:
    """For every model, rollout TP and worker: vLLM's traced layout, and what its own loading gives."""
    envvars.set_for_this_process(envvars.environment("rollout", "cpu", run_config(Path("unused")), job="tests"))
    from safetensors.torch import load_file

    from megatron_rl.weight_sync.ends.vllm_internals import offline_model

    traced: dict[str, dict[tuple[int, int], tuple]] = {}
    for key, folder in folders.items():
        traced[key] = {}
        tensors = load_file(Path(folder) / "model.safetensors")
        canonical = canonical_tensors(from_hf_config(Path(folder)))
        for tp in ROLLOUT_TP:
            for worker in range(tp):
                with offline_model(folder, tp, worker, torch.float32, "cpu") as model:
                    found = trace_layout(model, canonical, torch.float32)
                    model.load_weights(iter(tensors.items()))
                    loaded = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
                traced[key][tp, worker] = found, loaded
    return traced


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> dict[str, tuple[Architecture, dict[str, torch.Tensor], dict]]:
    """Model -> (architecture, Hugging Face's weights, traced workers)."""
    folders = {key: make_tiny(tmp_path_factory.mktemp("vllm") / "model", family, num_hidden_layers=4,
                              num_attention_heads=4, **sizes) for key, (family, sizes) in MODELS.items()}
    (traced,) = run_ranks(1, _trace, {key: str(folder) for key, folder in folders.items()}, timeout=120)
    return {key: (from_hf_config(folder),
                  {n: p.detach() for n, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()},
                  traced[key]) for key, folder in folders.items()}


CASES = [(key, tp, pp, rollout_tp) for key, (_, sizes) in MODELS.items()
         for tp, pp, rollout_tp in product((1, 2, 4), (1, 2, 4), ROLLOUT_TP)
         if sizes["num_key_value_heads"] % tp == 0]


@pytest.mark.parametrize("key, tp, pp, rollout_tp", CASES)
def test_megatron_to_vllm_is_what_vllm_loads_itself(vllm, key, tp, pp, rollout_tp):
    a, tensors, workers = vllm[key]
    training = training_plan(a, tp, pp, vpp=2 if pp == 2 else 1)
    from_trainer = sources(a, training)
    to_rollout = []
    for worker in range(rollout_tp):
        found, _ = workers[rollout_tp, worker]
        padding = Counter()
        for pad in found.padding:
            padding[pad.name] += torch.Size(pad.shape).numel()
        to_rollout.append(Destination(0, worker, found.layouts, dict.fromkeys(
            (layout.name for layout in found.layouts), "float32"), padding))
    manifest = build_manifest(from_trainer, to_rollout, bucket_bytes=100_000)
    prove_coverage(manifest, from_trainer, to_rollout)

    trainer = {at.rank: megatron_shards(a, training, at.rank, tensors) for at in training.ranks}
    loaded = {d.worker: {name: torch.from_numpy(value) for name, value in workers[rollout_tp, d.worker][1].items()}
              for d in to_rollout}
    live = {(0, worker): {name: torch.full_like(value, torch.nan) for name, value in values.items()}
            for worker, values in loaded.items()}
    for (_, worker), parameters in live.items():
        write_padding(parameters, workers[rollout_tp, worker][0].padding)
    execute(manifest, trainer, live)
    for d in to_rollout:
        for name, value in loaded[d.worker].items():
            assert torch.equal(live[0, d.worker][name], value), name
        sent = [digest_tiles(trainer[edge.rank][copy.source], [copy.source_tile])
                for edge in manifest.to_worker(0, d.worker) for bucket in edge.buckets for copy in bucket.copies]
        assert add(*sent) == digest_layouts(d.layouts, live[0, d.worker])
