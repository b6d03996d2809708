"""Megatron's layouts against Megatron's own model, an independent sharding and mbridge."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.config.schema import Trainer
from launch.model.architecture import Architecture
from launch.model.hf_config import from_hf_dict
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
from megatron_rl.layouts.tiles import tile_view
from megatron_rl.models import tiny
from megatron_rl.models.tiny import tiny_config
from tests.ranks import Rank, run_ranks
from tests.weight_sync.worlds import PADDING, architecture, megatron_shards, numbered, training_plan

FEATURES = ("qkv_bias", "qk_norm", "qk_norm_whole", "post_norm")
FAMILIES = {family: {name: getattr(from_hf_dict(tiny_config(family).to_dict()), name) for name in FEATURES}
            for family in tiny.FAMILIES}
SIZES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1), (1, 2, 2), (2, 2, 2)]


def holds(layouts, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters that the layouts describe, filled tile by tile; PADDING elsewhere."""
    parameters = {}
    for layout in layouts:
        assert layout.name not in parameters, f"{layout.name} occurs twice"
        parameters[layout.name] = torch.full(layout.shape, PADDING)
        for tile in layout.tiles:
            tile_view(parameters[layout.name], tile).copy_(tensors[tile.tensor][tile.slices])
    return parameters


def assemble(a: Architecture, training: TrainingPlan, shards: dict[int, dict[str, torch.Tensor]]
             ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Canonical tensors put together from all ranks' parameters, and how often each element was held."""
    whole = {t.name: torch.full(t.shape, PADDING) for t in canonical_tensors(a)}
    count = {t.name: torch.zeros(t.shape, dtype=torch.int64) for t in canonical_tensors(a)}
    for rank, parameters in shards.items():
        for layout in megatron_layout(a, training, rank, "local"):
            for tile in layout.tiles:
                whole[tile.tensor][tile.slices] = tile_view(parameters[layout.name], tile)
                count[tile.tensor][tile.slices] += 1
    return whole, count


@st.composite
def models_and_sizes(draw) -> tuple[Architecture, tuple[int, int, int]]:
    """Any architecture that TP, PP and VPP up to 4 x 3 x 3 divide, with sizes that need not divide one another."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    layers = pp * vpp * draw(st.integers(1, 2)) if vpp > 1 else draw(st.integers(pp, pp + 3))
    kv_heads = tp * draw(st.integers(1, 2))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    return architecture(
        family=family, **FAMILIES[family], tied=draw(st.booleans()), layers=layers, kv_heads=kv_heads,
        heads=kv_heads * draw(st.integers(1, 3)), head_dim=draw(st.integers(1, 5)), hidden=draw(st.integers(1, 9)),
        ffn=tp * draw(st.integers(1, 6)), vocab=draw(st.integers(1, 600))), (tp, pp, vpp)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(models_and_sizes())
@example((architecture(family="llama", qkv_bias=False, qk_norm=False, tied=True), (4, 2, 1)))
@example((architecture(tied=True), (2, 2, 2)))
def test_shard_then_assemble_is_the_model_bit_for_bit(case):
    a, (tp, pp, vpp) = case
    training, tensors = training_plan(a, tp, pp, vpp), numbered(a)
    shards = {at.rank: megatron_shards(a, training, at.rank, tensors) for at in training.ranks}
    for rank, truth in shards.items():
        found = holds(megatron_layout(a, training, rank, "local"), tensors)
        assert found.keys() == truth.keys()
        for name in truth:
            assert torch.equal(found[name], truth[name]), name
    whole, count = assemble(a, training, shards)
    for name, tensor in tensors.items():
        assert torch.equal(whole[name], tensor), name
        copies = 2 if name == "model.embed_tokens.weight" and a.tied and pp > 1 else 1
        cut = a.qk_norm_whole and name.endswith(("q_norm.weight", "k_norm.weight"))
        copies = tp if name.endswith("norm.weight") and not cut else copies
        assert (count[name] == copies).all(), name


def _real_parameters(rank: Rank, cases: list[tuple[Architecture, TrainingPlan]]) -> list[list[dict]]:
    """Names and shapes of the model that every rank of each case builds, on Megatron's own groups.

    torch's `fake` backend stands in for the network: groups and coordinates are real, nothing is sent.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_rl.trainer import cpu
    from megatron_rl.trainer.model import build_model

    cpu.install()
    trainer = Trainer(dtype="fp32", optimizer={"lr": 1e-3})
    found = []
    for a, training in cases:
        found.append([])
        for at in training.ranks:
            dist.init_process_group("fake", rank=at.rank, world_size=training.world_size, store=FakeStore())
            parallel_state.initialize_model_parallel(
                training.tp, training.pp, training.vpp if training.vpp > 1 else None,
                create_gloo_process_groups=False)
            tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
            chunks = build_model(a, training, trainer, torch.device("cpu"))
            found[-1].append({f"chunk{i}.{name}": tuple(p.shape) for i, chunk in enumerate(chunks)
                              for name, p in chunk.named_parameters()})
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return found


def test_names_and_shapes_are_those_of_megatrons_model():
    cases = []
    for family, switches in FAMILIES.items():
        for tied in (True, False):
            a = architecture(family=family, tied=tied, hidden=24, ffn=20, head_dim=6, **switches)
            cases += [(a, training_plan(a, *sizes)) for sizes in SIZES]
    uneven = architecture(layers=5, hidden=24, head_dim=6)
    cases += [(uneven, training_plan(uneven, 1, 2)), (uneven, training_plan(uneven, 2, 4))]
    (found,) = run_ranks(1, _real_parameters, cases, timeout=90)
    for (a, training), ranks in zip(cases, found, strict=True):
        for rank, parameters in enumerate(ranks):
            expected = {layout.name: layout.shape for layout in megatron_layout(a, training, rank, "local")}
            assert expected == parameters, (a.family, a.tied, training.tp, training.pp, training.vpp)


def _mbridge(a: Architecture, training: TrainingPlan):
    """mbridge's pure conversion functions, without the model that its constructor would want."""
    from mbridge.core.bridge import _MODEL_REGISTRY

    kind = _MODEL_REGISTRY[a.family]
    bridge = kind.__new__(kind)
    bridge.hf_config = SimpleNamespace(num_key_value_heads=a.kv_heads, hidden_size=a.hidden,
                                       num_attention_heads=a.heads, head_dim=a.head_dim,
                                       tie_word_embeddings=a.tied)
    bridge.config = SimpleNamespace(gated_linear_unit=True)
    bridge.make_vocab_size_divisible_by = 128
    bridge.vocab_size, bridge.padded_vocab_size = a.vocab, training.padded_vocab
    return bridge


@pytest.mark.parametrize("family, tied, tp, pp, vpp", [
    ("qwen3", False, 1, 1, 1), ("qwen3", False, 4, 2, 2), ("qwen2", True, 2, 2, 1), ("qwen2", True, 2, 2, 2),
    ("llama", False, 2, 2, 2), ("llama", True, 4, 1, 1)])
def test_transformer_engine_names_and_values_are_those_of_mbridge(family, tied, tp, pp, vpp):
    a = architecture(family=family, tied=tied, **FAMILIES[family])
    training, tensors = training_plan(a, tp, pp, vpp), numbered(a)
    bridge = _mbridge(a, training)
    for at in training.ranks:
        layouts = megatron_layout(a, training, at.rank, "transformer_engine")
        for layout, parameter in zip(layouts, holds(layouts, tensors).values(), strict=True):
            # mbridge knows no chunks and numbers layers over all stages.
            chunk, *parts = layout.name.split(".")
            if parts[1] == "layers":
                parts[2] = str(training.layers_of_stage[at.pp][int(chunk.removeprefix("chunk"))][int(parts[2])])
            name = ".".join(parts)
            if tied and name == "output_layer.weight":      # the last stage's copy, which mbridge leaves to Megatron
                name = "embedding.word_embeddings.weight"
            whole = bridge._weight_to_mcore_format(
                name, [tensors[hf] for hf in bridge._weight_name_mapping_mcore_to_hf(name)])
            truth = bridge._weight_split_across_tp(name, whole, parameter, tp)[at.tp].clone()
            if "embedding" in name or "output_layer" in name:
                truth[max(0, a.vocab - at.tp * len(truth)):] = PADDING    # mbridge pads with zeros
            assert torch.equal(parameter, truth), name


def test_the_two_implementations_differ_in_the_names_of_the_fused_norms_only():
    a = architecture()
    training = training_plan(a, tp=2, pp=2)
    renamed = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
               "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
    for rank in range(4):
        local = megatron_layout(a, training, rank, "local")
        fused = megatron_layout(a, training, rank, "transformer_engine")
        assert [(one.shape, one.tiles) for one in local] == [(other.shape, other.tiles) for other in fused]
        for one, other in zip(local, fused, strict=True):
            layer, suffix = one.name.split(".")[:4], ".".join(one.name.split(".")[4:])
            assert other.name == ".".join([*layer, renamed.get(suffix, suffix)] if suffix else layer)


def test_other_names_in_the_checkpoint_are_the_same_tiles():
    a, names = architecture(), {"q": "attn.query.weight", "mlp_norm": "norm2.weight"}
    renamed, training = replace(a, names=names), training_plan(a, tp=2)
    old = {"self_attn.q_proj.weight": names["q"], "post_attention_layernorm.weight": names["mlp_norm"]}

    def as_now(name: str) -> str:
        *path, kind = name.split(".", 3)
        return ".".join((*path, old.get(kind, kind)))

    assert [t.name for t in canonical_tensors(renamed)] == [as_now(t.name) for t in canonical_tensors(a)]
    for before, after in zip(megatron_layout(a, training, 1, "local"), megatron_layout(renamed, training, 1, "local"),
                             strict=True):
        assert after == replace(before, tiles=tuple(replace(t, tensor=as_now(t.tensor)) for t in before.tiles))


def test_what_megatron_has_no_place_for_is_refused():
    a = architecture(all_biases=True)
    with pytest.raises(ValueError, match="no place for down_bias, gate_bias"):
        megatron_layout(a, training_plan(a), 0, "local")


def test_layers_are_numbered_from_zero_in_every_chunk_and_stages_may_be_uneven():
    def first_norms(a, training, rank):
        return {layout.name: int(layout.tiles[0].tensor.split(".")[2])
                for layout in megatron_layout(a, training, rank, "local") if "input_layernorm" in layout.name}

    a = architecture(layers=8)
    assert first_norms(a, training_plan(a, pp=2, vpp=2), 1) == {
        "chunk0.decoder.layers.0.input_layernorm.weight": 2, "chunk0.decoder.layers.1.input_layernorm.weight": 3,
        "chunk1.decoder.layers.0.input_layernorm.weight": 6, "chunk1.decoder.layers.1.input_layernorm.weight": 7}
    a = architecture(layers=4)
    uneven = training_plan(a, pp=2, stages=(((0,),), ((1, 2, 3),)))
    assert list(first_norms(a, uneven, 1).values()) == [1, 2, 3]


@pytest.mark.parametrize("changes, plan, message", [
    ({"kv_heads": 2}, {"tp": 4}, "kv_heads = 2"), ({"ffn": 21}, {"tp": 2}, "ffn = 21"),
    ({}, {"pp": 2, "stages": (((0, 1),), ((3,),))}, r"layers \[0, 1, 3\]")])
def test_sizes_that_do_not_divide_are_refused_not_rounded(changes, plan, message):
    a = architecture(**changes)
    with pytest.raises(ValueError, match=message):
        megatron_layout(a, training_plan(a, **plan), 0, "local")
