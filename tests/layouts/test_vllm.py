"""The traced layout against vLLM's own loading, bit for bit, and what the tracer refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from launch.model.builtin import from_builtin
from launch.model.hf_config import from_hf_config
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.layouts.tiles import CanonicalTensor, tile_view
from megatron_rl.layouts.vllm import LayoutError, decode_layout, encode_layout, trace_layout, write_padding
from megatron_rl.weight_sync.ends.vllm_internals import offline_model
from megatron_rl.weight_sync.plan.copies import Destination
from megatron_rl.weight_sync.plan.coverage import prove_coverage
from megatron_rl.weight_sync.plan.manifest import build_manifest
from tests.ranks import Rank, run_ranks
from tests.rollout.engines import engine_environment
from tests.tiny_models import FAMILIES, make_tiny
from tests.weight_sync.receivers import load_as_vllm_does
from tests.weight_sync.worlds import sources, training_plan

VOCAB = 321
"""Padded to 384 by vLLM, and divisible by no TP."""
THROUGH_TRANSFORMERS = ("olmo2",)
"""Families that vLLM runs on transformers' own modules. It rewrites their classes for good: nobody can build one of
transformers' models in the same process afterwards."""


@pytest.fixture(scope="module", autouse=True)
def _environment():
    with engine_environment():
        yield


def _canonical(tensors: dict[str, torch.Tensor]) -> list[CanonicalTensor]:
    return [CanonicalTensor(name, tuple(tensor.shape)) for name, tensor in tensors.items()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - THROUGH_TRANSFORMERS))
def test_tiles_equal_vllms_own_loading(tmp_path, family, tied):
    wide_heads = {"head_dim": 64} if family == "qwen3" else {}
    _assert_tiles_equal_vllms_own_loading(
        make_tiny(tmp_path, family, vocab_size=VOCAB, tie_word_embeddings=tied, **wide_heads))


@pytest.mark.parametrize("family", THROUGH_TRANSFORMERS)
def test_tiles_equal_vllms_own_loading_through_transformers(tmp_path, family):
    folders = [make_tiny(tmp_path / str(tied), family, vocab_size=VOCAB, tie_word_embeddings=tied)
               for tied in (False, True)]
    run_ranks(1, _in_a_process_of_its_own, folders)


def _in_a_process_of_its_own(rank: Rank, folders: list[Path]) -> None:
    with engine_environment():
        for folder in folders:
            _assert_tiles_equal_vllms_own_loading(folder)


def _assert_tiles_equal_vllms_own_loading(folder: Path) -> None:
    """Two KV heads, so TP 4 repeats them; every live parameter whole, its padding included."""
    tensors = load_file(folder / "model.safetensors")
    _assert_buffers_depend_on_no_checkpoint(folder)
    for tp in (1, 2, 4):
        workers = []
        for rank in range(tp):
            with offline_model(folder, tp, rank, torch.float32) as blueprint:
                traced = trace_layout(blueprint, _canonical(tensors), torch.float32)
            with offline_model(folder, tp, rank, torch.float32, device="cpu") as model:
                live = dict(model.named_parameters())
                for parameter in live.values():
                    parameter.data.fill_(torch.nan)
                model.load_weights(iter(tensors.items()))
                loaded = {name: parameter.detach().clone() for name, parameter in live.items()}
                for parameter in live.values():
                    parameter.data.fill_(torch.nan)
                for layout in map(decode_layout, map(encode_layout, traced.layouts)):
                    for tile in layout.tiles:
                        tile_view(live[layout.name], tile).copy_(tensors[tile.tensor][tile.slices])
                write_padding(live, traced.padding)
            assert {layout.name for layout in traced.layouts} == set(live)
            assert traced.unused == ()
            workers.append(Destination(0, rank, traced.layouts, dict.fromkeys(live, "float32"),
                                       traced.padded_elements()))
            for name, expected in loaded.items():
                assert torch.equal(live[name].detach(), expected), f"TP {tp} rank {rank}: {name}"
        architecture = from_hf_config(folder)
        trainer = sources(architecture, training_plan(architecture, 2, 2))
        prove_coverage(build_manifest(trainer, workers), trainer, workers)      # nothing that is trained stays behind


def _assert_buffers_depend_on_no_checkpoint(folder: Path) -> None:
    """vLLM's dummy weights are noise in every buffer of the state dict. After its loading, those of an engine that
    started with them are those of one that loaded the checkpoint."""
    found = []
    with offline_model(folder, 1, 0, torch.float32):
        pass            # models of a process share nothing, whatever their device
    for weights in (None, folder):
        with offline_model(folder, 1, 0, torch.float32, device="cpu") as model:
            load_as_vllm_does(model, weights)
            found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    dummy, real = found
    assert any("_scale" in name for name in real) and dummy.keys() == real.keys()
    assert all(torch.equal(dummy[name], real[name]) for name in real)


def test_a_buffer_without_a_source_is_refused_by_name(tmp_path):
    """Part of vLLM's checkpoint, and of no layer that vLLM processes after loading: it would keep noise."""
    folder = make_tiny(tmp_path, "qwen2", vocab_size=VOCAB)
    tensors = _canonical(load_file(folder / "model.safetensors"))
    with offline_model(folder, 1, 0, torch.float32) as model:
        attention, norm = model.model.layers[0].self_attn.attn, model.model.layers[1].input_layernorm
        attention.register_buffer("sink", torch.zeros(4, device="meta"))
        norm.register_buffer("table", torch.zeros(4, device="meta"), persistent=False)
        trace_layout(model, tensors, torch.float32)
        norm.register_buffer("running", torch.zeros(4, device="meta"))
        with pytest.raises(LayoutError, match="no tensor of the trainer goes into model.layers.1.input_layernorm.runn"):
            trace_layout(model, tensors, torch.float32)


def test_a_loader_that_writes_into_a_buffer_is_refused():
    model = _Loader(lambda p, t: (p.copy_(t), model.scale.copy_(t)))
    model.register_buffer("scale", torch.zeros(4, 4), persistent=False)
    with pytest.raises(LayoutError, match="writes into the buffer scale"):
        trace_layout(model, [CanonicalTensor("w", (4, 4))], torch.float32)


def test_tracing_a_live_model_writes_nothing(tmp_path):
    folder = make_tiny(tmp_path, "qwen2", vocab_size=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    with offline_model(folder, 2, 1, torch.float32, device="cpu") as model:
        for number, parameter in enumerate(model.parameters()):
            parameter.data.fill_(float(number))
        trace_layout(model, _canonical(tensors), torch.float32)
        assert all((p == float(number)).all() for number, p in enumerate(model.parameters()))


class _Loader(nn.Module):
    """A model of one parameter whose loader does `load(parameter, tensor)`."""

    def __init__(self, load, shape=(4, 4), dtype=torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.load = load

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.load(self.weight, tensor)


@pytest.mark.parametrize("load, message", [
    (lambda p, t: p.copy_(t.t()), "not a box"),
    (lambda p, t: p.copy_(t + 1), "not a view"),
    (lambda p, t: p.copy_(t.flip(0)), "not a view"),
    (lambda p, t: p.add_(t), "add_"),
    (lambda p, t: p[:2].copy_(t[:2]), r"leaves 8 of 16 elements of weight unset, such as \[2:4, 0:4\]"),
    (lambda p, t: (p.copy_(t), p[1:2].copy_(t[1:2])), r"more than once at \[1:2, 0:4\]"),
    (lambda p, t: p.copy_(t[:1]), "not a box"),
    (lambda p, t: setattr(p, "data", torch.ones(4, 4)), "replaced the storage"),
], ids=["transposed", "computed", "reordered", "added", "missing", "twice", "broadcast", "replaced"])
def test_what_is_not_a_copy_of_boxes_is_refused(load, message):
    with pytest.raises(LayoutError, match=message):
        trace_layout(_Loader(load), [CanonicalTensor("w", (4, 4))], torch.float32)


def test_a_cast_is_refused():
    with pytest.raises(LayoutError, match="bfloat16"):
        trace_layout(_Loader(lambda p, t: p.copy_(t), dtype=torch.bfloat16), [CanonicalTensor("w", (4, 4))],
                     torch.float32)


def test_an_empty_live_parameter_is_refused():
    """What vLLM's CPU build leaves of a linear weight that it packed after loading."""
    with pytest.raises(LayoutError, match="empty .* weight"):
        trace_layout(_Loader(lambda p, t: None, shape=(0,)), [], torch.float32)


def test_a_worker_of_a_70b_is_traced_without_looking_at_its_elements(tmp_path):
    """CPU seconds, so other load does not count. With a byte per element it took minutes."""
    shape = from_builtin("llama3.1-70b")
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab, "torch_dtype": "bfloat16"}))
    with offline_model(tmp_path, 4, 1, torch.bfloat16) as model:
        began = time.process_time()
        traced = trace_layout(model, canonical_tensors(shape), torch.bfloat16)
        assert time.process_time() - began < 5
    assert sum(tile.numel for layout in traced.layouts for tile in layout.tiles) > 70e9 / 4
