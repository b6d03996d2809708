"""Trainer to engine without processes: Megatron layouts -> manifest -> wire -> live vLLM parameters, for many sizes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from launch.planner.architecture import from_hf_config
from megatron_rl.weight_sync.coverage import prove_coverage
from megatron_rl.weight_sync.digest import add, digest_layouts
from megatron_rl.weight_sync.hf_io import CheckpointReader, load_layout
from megatron_rl.weight_sync.manifest import Destination, Edge, Source, build_manifest
from megatron_rl.weight_sync.megatron_layout import canonical_tensors, megatron_layout
from megatron_rl.weight_sync.vllm_internals import offline_model
from megatron_rl.weight_sync.vllm_layout import trace_layout, write_padding
from megatron_rl.weight_sync.wire import (
    WireError, buffer_bytes, destination_tiles, pack_bucket, poison, source_tiles, unpack_bucket,
)
from tests.rollout.engines import engine_environment
from tests.tiny_models import make_tiny
from tests.weight_sync.worlds import training_plan

BUCKET = 50_000
"""Smaller than the embedding: a tensor larger than three buckets is cut."""


@pytest.fixture(scope="module", autouse=True)
def _environment():
    with engine_environment():
        yield


@pytest.fixture(scope="module", params=[("llama", False), ("qwen2", True), ("qwen3", False)],
                ids=["llama", "qwen2-tied", "qwen3"])
def model(request, tmp_path_factory):
    family, tied = request.param
    return make_tiny(tmp_path_factory.mktemp(family), family, vocab_size=321, num_hidden_layers=4,
                     tie_word_embeddings=tied, num_key_value_heads=4, num_attention_heads=8, hidden_size=96,
                     **({} if family == "qwen2" else {"head_dim": 32}))


def _sources(folder, tp, pp):
    architecture = from_hf_config(folder)
    training = training_plan(architecture, tp=tp, pp=pp)
    held = []
    with CheckpointReader(folder) as reader:
        for rank in range(training.world_size):
            layouts = megatron_layout(architecture, training, rank, "local")
            parameters = {layout.name: torch.empty(layout.shape) for layout in layouts}
            load_layout(reader, canonical_tensors(architecture), layouts, parameters)
            held.append((Source(training.ranks[rank], tuple(layouts), dict.fromkeys(parameters, "float32")), parameters))
    return architecture, held


def _send(edge: Edge, source: dict, live: dict, epoch: int = 1) -> None:
    for number, bucket in enumerate(edge.buckets):
        buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8)
        filled = pack_bucket(bucket, number, epoch, source, buffer)
        unpack_bucket(bucket, number, epoch, filled, live)


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
def test_every_trainer_layout_gives_vllms_own_weights(model, rollout_tp):
    """TP 1, 2, 4 x PP 1, 2, 4: all live parameters equal those vLLM loads itself, and digests agree on every edge."""
    tensors = load_file(model / "model.safetensors")
    workers = []
    for rank in range(rollout_tp):
        with offline_model(model, rollout_tp, rank, torch.float32, device="cpu") as engine:
            traced = trace_layout(engine, canonical_tensors(from_hf_config(model)), torch.float32)
            engine.load_weights(iter(tensors.items()))
            live = dict(engine.named_parameters())
            loaded = {name: parameter.detach().clone() for name, parameter in live.items()}
        destination = Destination(0, rank, traced.layouts, dict.fromkeys(live, "float32"), traced.padded_elements())
        workers.append((destination, live, loaded, traced.padding))

    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            _, held = _sources(model, tp, pp)
            sources = [source for source, _ in held]
            destinations = [destination for destination, *_ in workers]
            manifest = build_manifest(sources, destinations, BUCKET)
            prove_coverage(manifest, sources, destinations)
            for destination, live, loaded, padding in workers:
                for parameter in live.values():
                    parameter.data.fill_(torch.nan)
                write_padding(live, padding)
                edges = manifest.to_worker(0, destination.worker)
                for edge in edges:
                    _send(edge, held[edge.rank][1], live)
                for name, expected in loaded.items():
                    assert torch.equal(live[name].detach(), expected), f"TP {tp} PP {pp}: {name}"
                parts = []
                for edge in edges:
                    parts.append(digest_layouts(source_tiles(edge), held[edge.rank][1]))
                    assert parts[-1] == digest_layouts(destination_tiles(edge), live)
                assert add(*parts) == digest_layouts(destination.layouts, live)


def test_a_buffer_that_nobody_wrote_or_that_is_late_is_refused(model):
    _, held = _sources(model, 1, 1)
    with offline_model(model, 1, 0, torch.float32, device="cpu") as engine:
        traced = trace_layout(engine, canonical_tensors(from_hf_config(model)), torch.float32)
        live = dict(engine.named_parameters())
    destination = Destination(0, 0, traced.layouts, dict.fromkeys(live, "float32"), traced.padded_elements())
    (edge,) = build_manifest([held[0][0]], [destination], BUCKET).edges
    first, second = edge.buckets[:2]
    buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8)
    for parameter in live.values():
        parameter.data.fill_(7.0)

    with pytest.raises(WireError, match="never arrived"):
        unpack_bucket(first, 0, 5, poison(buffer), live)
    pack_bucket(first, 0, 4, held[0][1], buffer)
    with pytest.raises(WireError, match="bucket 0 of epoch 5.*received bucket 0 of epoch 4"):
        unpack_bucket(first, 0, 5, buffer, live)
    pack_bucket(second, 1, 5, held[0][1], buffer)
    with pytest.raises(WireError, match="bucket 0 of epoch 5.*received bucket 1 of epoch 5"):
        unpack_bucket(first, 0, 5, buffer, live)
    assert all((parameter == 7.0).all() for parameter in live.values()), "a refused bucket was written"
