"""Loading from and exporting to Hugging Face folders, against transformers' own reading, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.errors import UserError
from launch.model.architecture import Architecture
from launch.model.hf_config import from_hf_config
from launch.plan.plan import TrainingPlan
from megatron_rl.layouts import step_folder
from megatron_rl.layouts.digest import add
from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
from megatron_rl.layouts.hf_write import Exporter, owned_tiles, shard_files
from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
from tests.tiny_models import make_tiny
from tests.weight_sync.worlds import architecture, megatron_shards, training_plan

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=301)


@pytest.fixture
def copy(tiny, tmp_path) -> Path:
    """A folder of this test's own to damage."""
    return shutil.copytree(tiny, tmp_path / "copy")


def load(folder: Path, a: Architecture, training: TrainingPlan, rank: int, dtype=torch.float32, fill: float = 9.0):
    layouts = megatron_layout(a, training, rank, "local")
    parameters = {layout.name: torch.full(layout.shape, fill, dtype=dtype) for layout in layouts}
    with CheckpointReader(folder) as reader:
        report = load_layout(reader, canonical_tensors(a), layouts, parameters)
    return parameters, report


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def edit_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [None, "60KB"])
def test_every_rank_reads_its_shard_and_no_more(tiny, tmp_path, shards, dtype):
    folder = tiny
    if shards:
        folder = tmp_path / "sharded"
        AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(folder, max_shard_size=shards)
        assert len(list(folder.glob("*.safetensors"))) > 2
    a = from_hf_config(folder)
    training, truth = training_plan(a, tp=2, pp=2), {name: p.detach() for name, p in weights(folder).items()}
    for at in training.ranks:
        parameters, report = load(folder, a, training, at.rank, dtype)
        held = sum(tile.numel for layout in megatron_layout(a, training, at.rank, "local") for tile in layout.tiles)
        assert report.bytes_read == held * 4 and report.unused == ()
        for name, expected in megatron_shards(a, training, at.rank, truth).items():
            if "word_embeddings" in name or "output_layer" in name:
                expected[max(0, a.vocab - at.tp * len(expected)):] = 0.0        # padding is zeroed
            assert torch.equal(parameters[name], expected.to(dtype)), name


def test_parameters_that_are_views_of_a_flat_buffer_are_filled_in_place(tiny):
    a = from_hf_config(tiny)
    layouts = megatron_layout(a, training_plan(a), 0, "local")
    sizes = [torch.Size(layout.shape).numel() for layout in layouts]
    parts = torch.full((sum(sizes) + 3,), 9.0)[3:].split(sizes)
    parameters = {layout.name: part.view(layout.shape) for layout, part in zip(layouts, parts, strict=True)}
    with CheckpointReader(tiny) as reader:
        load_layout(reader, canonical_tensors(a), layouts, parameters)
    for name, expected in load(tiny, a, training_plan(a), 0)[0].items():
        assert torch.equal(parameters[name], expected)


def test_a_tied_checkpoint_may_carry_its_head(tmp_path):
    folder = make_tiny(tmp_path / "tied", tie_word_embeddings=True)
    a = from_hf_config(folder)
    training = training_plan(a, tp=2, pp=2)
    without = [load(folder, a, training, rank)[0] for rank in range(4)]
    edit_weights(folder, lambda t: t.update({LM_HEAD: t[EMBEDDING].clone()}))
    for rank in range(4):
        parameters, report = load(folder, a, training, rank)
        assert report.unused == (LM_HEAD,)
        assert all(torch.equal(parameters[name], value) for name, value in without[rank].items())
    first, last = without[0], without[2]
    assert torch.equal(first["chunk0.embedding.word_embeddings.weight"], last["chunk0.output_layer.weight"])

    edit_weights(folder, lambda t: t[LM_HEAD].add_(1))
    with pytest.raises(UserError, match="ties the embeddings, but lm_head.weight and .* differ"):
        load(folder, a, training, 0)


def test_an_untied_checkpoint_without_a_head_is_refused(copy):
    edit_weights(copy, lambda t: t.pop(LM_HEAD))
    a = from_hf_config(copy)
    with pytest.raises(UserError, match="no lm_head.weight, but its config.json says tie_word_embeddings: false"):
        load(copy, a, training_plan(a, pp=2), 0)         # rank 0 holds no head, and refuses too


def test_a_missing_tensor_and_a_wrong_shape_are_named_on_every_rank(copy):
    a = from_hf_config(copy)
    with pytest.raises(UserError, match=r"embed_tokens.weight has shape \[301, 128\].*\[311, 128\]"):
        load(copy, replace(a, vocab=311), training_plan(a, pp=2), 1)
    edit_weights(copy, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match="lacks the tensor model.layers.1.mlp.up_proj.weight"):
        load(copy, a, training_plan(a, pp=2), 0)         # layer 1 lies on the other stage


def test_a_tensor_that_the_architecture_would_drop_is_refused_and_other_leftovers_are_reported(copy):
    a = from_hf_config(copy)
    leftovers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                 "model.layers.7.mlp.up_proj.weight": torch.ones(4), "something.else": torch.ones(4)}
    edit_weights(copy, lambda t: t.update(leftovers))
    assert load(copy, a, training_plan(a), 0)[1].unused == tuple(sorted(leftovers))
    edit_weights(copy, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(128)}))
    with pytest.raises(UserError, match="has model.layers.0.self_attn.o_proj.bias, which the architecture"):
        load(copy, a, training_plan(a), 0)


def test_folders_that_are_no_checkpoint_are_refused(copy, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        CheckpointReader(tmp_path / "absent")
    with pytest.raises(UserError, match="no model.safetensors"):
        CheckpointReader(tmp_path)
    file = copy / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match="truncated"):
        CheckpointReader(copy)


@pytest.mark.parametrize("damage, message", [
    (lambda folder, index: index["weight_map"].update({EMBEDDING: "gone.safetensors"}), "names gone.safetensors"),
    (lambda folder, index: index["weight_map"].update({"extra": next(iter(index["weight_map"].values()))}),
     "holds extra, but it does not"),
    (lambda folder, index: index.pop("weight_map"), "not a safetensors index"),
])
def test_an_index_that_does_not_fit_its_shards_is_refused(tiny, tmp_path, damage, message):
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(tmp_path, max_shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    damage(tmp_path, index)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        CheckpointReader(tmp_path)


def test_layouts_of_another_model_are_refused_before_anything_is_written(tiny):
    a = from_hf_config(tiny)
    layouts = megatron_layout(a, training_plan(a), 0, "local")
    parameters = {layout.name: torch.full(layout.shape, 9.0) for layout in layouts[1:]}
    with CheckpointReader(tiny) as reader, pytest.raises(ValueError, match="word_embeddings.weight: layout"):
        load_layout(reader, canonical_tensors(a), layouts, parameters)
    assert all((parameter == 9.0).all() for parameter in parameters.values())


def owned(a: Architecture, training: TrainingPlan, rank: int) -> dict[str, list[int]]:
    one_replica = {at.rank: megatron_layout(a, training, at.rank, "local") for at in training.ranks
                   if (at.dp, at.cp) == (0, 0)}
    me = training.ranks[rank]
    peer = next(r for r in one_replica if (training.ranks[r].tp, training.ranks[r].pp) == (me.tp, me.pp))
    return owned_tiles(one_replica, peer, me.dp * training.cp + me.cp, training.dp * training.cp)


def export(folder: Path, out: Path, training: TrainingPlan, dtype, max_shard_bytes: int = 10**9) -> None:
    """All ranks' export, one after the other; what they hold and what then lies in the files is compared."""
    a = from_hf_config(folder)
    exporter = Exporter(out, canonical_tensors(a), dtype, max_shard_bytes)
    exporter.prepare(folder, a)
    held, found = {}, {}
    for at in training.ranks:
        parameters, _ = load(folder, a, training, at.rank, dtype)
        layouts = megatron_layout(a, training, at.rank, "local")
        for name, digest in exporter.write(layouts, parameters, owned(a, training, at.rank)).items():
            held[name] = add(held.get(name, 0), digest)
    for at in training.ranks:
        part = exporter.read_back(at.rank, training.world_size)
        assert not found.keys() & part.keys(), "a tensor read back twice"
        found |= part
    assert held == found and len(found) == len(canonical_tensors(a))
    assert not out.exists(), "an unfinished export must not look like a model"
    step_folder.publish(out, {})


@pytest.mark.parametrize("family, tied, sizes", [
    ("llama", True, dict(tp=2, pp=2)), ("llama", False, dict(pp=2, vpp=2, dp=2)),
    ("qwen2", True, dict(tp=2, cp=2, dp=2)), ("qwen2", False, dict(tp=2, pp=4)),
    ("qwen3", True, dict(pp=4)), ("qwen3", False, dict(tp=4, pp=2)),
    ("mistral", False, dict(tp=2, dp=2)), ("olmo2", False, dict(tp=2, pp=2)), ("olmo2", True, dict(tp=4, dp=2))])
def test_an_export_is_the_model_for_transformers(family, tied, sizes, tmp_path):
    folder = make_tiny(tmp_path / "model", family, tie_word_embeddings=tied, num_hidden_layers=4,
                       num_key_value_heads=4, vocab_size=301)
    a = from_hf_config(folder)
    export(folder, tmp_path / "out", training_plan(a, **sizes), torch.float32, max_shard_bytes=500_000)
    truth, found = weights(folder), weights(tmp_path / "out")
    assert found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)
    text = "one plus two"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(folder)(text)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", [dict(tp=2, pp=2, cp=2, dp=3), dict(pp=3, dp=4), dict(tp=4, vpp=2, pp=2, dp=2)])
def test_every_element_has_one_writer_replicas_share_and_a_tensor_has_one_replica(tied, sizes):
    a = architecture(layers=12, hidden=24, ffn=64, vocab=300, tied=tied)
    training = training_plan(a, **sizes)
    count = {t.name: torch.zeros(t.shape, dtype=torch.int64) for t in canonical_tensors(a)}
    replicas, elements = {}, Counter()
    for at in training.ranks:
        layouts = {layout.name: layout for layout in megatron_layout(a, training, at.rank, "local")}
        for name, indices in owned(a, training, at.rank).items():
            for tile in (layouts[name].tiles[index] for index in indices):
                count[tile.tensor][tile.slices] += 1
                replicas.setdefault(tile.tensor, set()).add((at.dp, at.cp))
                elements[at.pp, at.dp, at.cp] += tile.numel
    assert all((each == 1).all() for each in count.values())
    assert all(len(each) == 1 for each in replicas.values())
    for pp in range(training.pp):
        shares = [elements[at.pp, at.dp, at.cp] for at in training.ranks if at.pp == pp and at.tp == 0]
        assert max(shares) <= sum(shares) / len(shares) + max(each.numel() for each in count.values())


def test_an_export_in_bf16_is_a_bf16_model_in_one_file(tiny, tmp_path):
    a = from_hf_config(tiny)
    export(tiny, tmp_path / "out", training_plan(a, tp=2), torch.bfloat16)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    truth, found = weights(tiny), weights(tmp_path / "out")
    assert all(found[name].dtype == torch.bfloat16 for name in found)
    assert all(torch.equal(found[name], truth[name].bfloat16()) for name in truth)


def test_shards_hold_at_most_what_was_asked_for(tiny):
    canonical = canonical_tensors(from_hf_config(tiny))
    files = shard_files(canonical, torch.bfloat16, 70_000)
    assert [name for file in files for name in file.offsets] == [t.name for t in canonical]
    for file in files:
        assert len(file.offsets) == 1 or file.size - len(file.header) <= 70_000
        assert len(file.header) % 8 == 0


def test_an_export_does_not_overwrite_and_survives_an_interrupted_one(tiny, tmp_path):
    a = from_hf_config(tiny)
    exporter = Exporter(tmp_path / "out", canonical_tensors(a), torch.float32)
    exporter.prepare(tiny, a)
    (tmp_path / ".out.partial" / "left").touch()
    export(tiny, tmp_path / "out", training_plan(a), torch.float32)
    assert not (tmp_path / "out" / "left").exists() and not (tmp_path / ".out.partial").exists()
    with pytest.raises(UserError, match="already exists"):
        exporter.prepare(tiny, a)


def test_a_full_disk_is_told_before_any_weight_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    a = from_hf_config(tiny)
    exporter = Exporter(tmp_path / "out", canonical_tensors(a), torch.float32)
    with pytest.raises(UserError, match="they need .* bytes, 1,000,000 are free"):
        exporter.prepare(tiny, a)
