"""The wire: buckets packed from Megatron's parameters and unpacked into vLLM's, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.digest import add, digest_layouts
from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
from megatron_rl.layouts.vllm import trace_layout, write_padding
from megatron_rl.weight_sync.ends.vllm_internals import offline_model
from megatron_rl.weight_sync.plan.manifest import Destination, Source, build_manifest
from megatron_rl.weight_sync.wire.packing import (
    WireError,
    buffer_bytes,
    destination_tiles,
    pack_bucket,
    poison,
    source_tiles,
    unpack_bucket,
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


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2", vocab_size=321)


def _sources(folder, tp, pp):
    architecture = from_hf_config(folder)
    training = training_plan(architecture, tp=tp, pp=pp)
    held = []
    with CheckpointReader(folder) as reader:
        for rank in range(training.world_size):
            layouts = megatron_layout(architecture, training, rank, "local")
            parameters = {layout.name: torch.empty(layout.shape) for layout in layouts}
            load_layout(reader, canonical_tensors(architecture), layouts, parameters)
            source = Source(training.ranks[rank], tuple(layouts), dict.fromkeys(parameters, "float32"))
            held.append((source, parameters))
    return architecture, held


def test_packed_and_unpacked_buckets_give_vllms_own_weights(model):
    """Trainer TP2 x PP2 to rollout TP2: live parameters equal those vLLM loads itself, edge digests agree."""
    tensors = load_file(model / "model.safetensors")
    _, held = _sources(model, 2, 2)
    sources = [source for source, _ in held]
    for worker in range(2):
        with offline_model(model, 2, worker, torch.float32, device="cpu") as engine:
            traced = trace_layout(engine, canonical_tensors(from_hf_config(model)), torch.float32)
            engine.load_weights(iter(tensors.items()))
            live = dict(engine.named_parameters())
        loaded = {name: parameter.detach().clone() for name, parameter in live.items()}
        for parameter in live.values():
            parameter.data.fill_(torch.nan)
        write_padding(live, traced.padding)
        destination = Destination(0, worker, traced.layouts, dict.fromkeys(live, "float32"), traced.padded_elements())
        parts, edges = [], build_manifest(sources, [destination], BUCKET).edges
        assert max(len(edge.buckets) for edge in edges) > 3
        for edge in edges:
            for number, bucket in enumerate(edge.buckets):
                buffer = torch.empty(buffer_bytes([edge]), dtype=torch.uint8)
                filled = pack_bucket(bucket, number, 1, held[edge.rank][1], buffer)
                unpack_bucket(bucket, number, 1, filled, live)
            parts.append(digest_layouts(source_tiles(edge), held[edge.rank][1]))
            assert parts[-1] == digest_layouts(destination_tiles(edge), live)
        assert add(*parts) == digest_layouts(destination.layouts, live)
        for name, expected in loaded.items():
            assert torch.equal(live[name].detach(), expected), name


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
