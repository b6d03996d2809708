"""Versions of the weights on disk: written by real Megatron ranks, TP2 x PP2, complete or absent, read by others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch.errors import UserError
from megatron_rl.layouts import step_folder as files
from megatron_rl.layouts.disk_check import differences, digests_of_files, main, recorded_digests, refuse_changed
from megatron_rl.weight_sync.disk import NotWritten, VersionsOnDisk
from megatron_rl.weight_sync.protocol import SyncError
from tests.tiny_models import make_tiny
from tests.trainer.harness import hugging_face
from tests.trainer.runs import batches, config_of
from tests.weight_sync.trainers import trainer_ranks

MODELS = [("llama", False), ("llama", True), ("qwen3", False), ("qwen3", True)]


class _World:
    """Four ranks, and the event loop from which they are called."""

    def __init__(self, runner: asyncio.Runner, ranks: list, model: Path) -> None:
        self.runner, self.ranks, self.model = runner, ranks, model

    def each(self, method: str, *args) -> list:
        async def all_of() -> list:
            return await asyncio.gather(*[rank.call(method, *args) for rank in self.ranks])

        return self.runner.run(all_of())

    def versions(self, root: Path, keep: int = 2) -> VersionsOnDisk:
        return VersionsOnDisk(dict(enumerate(self.ranks)), root, keep)

    def write(self, versions: VersionsOnDisk, version: int):
        return self.runner.run(versions.write(version))

    def call(self, rank: int, method: str, *args):
        return self.runner.run(self.ranks[rank].call(method, *args))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    model = make_tiny(tmp_path_factory.mktemp("disk") / "model", "llama", vocab_size=301)
    with trainer_ranks(config_of(model, tp=2, pp=2)) as ranks, asyncio.Runner() as runner:
        yield _World(runner, ranks, model)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def names(root: Path) -> list[str]:
    return sorted(folder.name for folder in root.iterdir())


def test_a_version_is_the_model_bit_for_bit(world, tmp_path):
    written = world.write(world.versions(tmp_path), 3)
    assert written.folder == tmp_path / "step-000003" and files.incomplete_because(written.folder) is None
    assert written.nbytes == sum(file.stat().st_size for file in written.folder.iterdir()
                                 if file.name != files.COMPLETE)
    truth, found = weights(world.model), weights(written.folder)
    assert found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("family, tied", MODELS)
def test_hugging_face_computes_with_a_version_what_the_trainer_does(world, tmp_path, family, tied):
    model = make_tiny(tmp_path / "model", family, vocab_size=301, tie_word_embeddings=tied)
    world.each("train", config_of(model, tp=2, pp=2))
    folder = world.write(world.versions(tmp_path / "weights"), 1).folder
    batch = batches(301, 1, first=5)[0]
    ours = world.each("logprobs", batch)[0]
    completion = ours != 0
    before, after = (np.where(completion, hugging_face(each, batch)[0], 0) for each in (model, folder))
    assert completion.any() and np.abs(ours - before).max() > 1e-2, "the update changed nothing"
    np.testing.assert_allclose(ours, after, atol=2e-5)


def test_older_versions_go_when_a_newer_one_is_whole_and_stale_ones_on_a_resume(world, tmp_path):
    versions = world.versions(tmp_path, keep=2)
    for version in (2, 4, 6):
        world.write(versions, version)
    assert names(tmp_path) == ["step-000004", "step-000006"]
    assert versions.forget_after(4) == [tmp_path / "step-000006"]
    assert names(tmp_path) == ["step-000004"]
    world.write(versions, 6)
    assert files.latest_complete(tmp_path).name == "step-000006"


def test_a_changed_byte_exchanged_tensors_and_a_missing_file_are_found_afterwards(world, tmp_path, capsys):
    folder = world.write(world.versions(tmp_path), 1).folder
    assert main([str(folder)]) == 0
    file, recorded = folder / "model.safetensors", recorded_digests(folder)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main([str(folder)]) == 1
    assert capsys.readouterr().out.count("not what the trainer had") == 1
    with pytest.raises(UserError, match="1 tensors are not what the trainer had: "):
        refuse_changed(folder)

    tensors = load_file(file)
    down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
    tensors[down[0]], tensors[down[1]] = tensors[down[1]], tensors[down[0]]
    save_file(tensors, file)
    assert set(down) < set(files.unlike(recorded, digests_of_files(folder, recorded)))
    file.unlink()
    with pytest.raises(UserError, match="model.safetensors is missing"):
        recorded_digests(folder)
    assert files.latest_complete(tmp_path) is None and main([str(folder)]) == 2


def test_live_parameters_are_compared_by_their_bits(world, tmp_path):
    from launch.model.hf_config import from_hf_config
    from megatron_rl.layouts.hf_read import CheckpointReader, load_layout
    from megatron_rl.layouts.megatron import canonical_tensors, megatron_layout
    from tests.weight_sync.worlds import training_plan

    a = from_hf_config(world.model)
    layouts = megatron_layout(a, training_plan(a, tp=2), 1, "local")
    live = {layout.name: torch.zeros(layout.shape) for layout in layouts}
    with CheckpointReader(world.model) as reader:
        load_layout(reader, canonical_tensors(a), layouts, live)
    assert differences(live, layouts, world.model) == []
    norm, rows = "chunk0.decoder.final_layernorm.weight", "chunk0.decoder.layers.1.mlp.linear_fc2.weight"
    live[norm][3] = torch.nan
    live[rows][:2] += 1
    lines = differences(live, layouts, world.model)
    assert len(lines) == 2 and any("model.norm.weight" in line and ": 1 of" in line for line in lines)
    live[norm] = live[norm].bfloat16()
    assert any("torch.bfloat16 in the engine, torch.float32 on disk" in line
               for line in differences(live, layouts, world.model))


def test_writes_that_are_lost_are_found_before_the_version_appears(world, tmp_path):
    """The files are sparse: what was not written reads as zeros, in files of the right size."""
    versions = world.versions(tmp_path)
    world.write(versions, 1)
    world.call(2, "damage_writes", True)
    with pytest.raises(NotWritten, match="do not hold what the training ranks hold: .*model.layers.1"):
        world.write(versions, 2)
    assert names(tmp_path) == ["step-000001"]
    world.call(2, "damage_writes", False)
    world.write(versions, 2)


def test_a_rank_over_its_quota_is_told_and_the_training_goes_on(world, tmp_path):
    versions = world.versions(tmp_path)
    world.write(versions, 1)
    world.call(3, "limit_files", 100_000)
    with pytest.raises(NotWritten, match=r"trainer rank 3 could not write the weights: .*File too large"):
        world.write(versions, 2)
    assert names(tmp_path) == ["step-000001"], "the partial version gave its space back"
    world.call(3, "limit_files", -1)
    world.each("logprobs", batches(301, 1)[0])
    world.write(versions, 2)
    assert json.loads((tmp_path / "step-000002" / files.COMPLETE).read_text())["version"] == 2


def test_a_rank_that_is_killed_in_the_middle_leaves_the_version_before(world, tmp_path):
    """The last test of these ranks."""
    versions = world.versions(tmp_path, keep=1)
    world.write(versions, 1)
    world.call(3, "die_at_write", 40)
    with pytest.raises(SyncError, match="trainer rank 3"):
        world.write(versions, 2)
    assert names(tmp_path) == [".step-000002.partial", "step-000001"]
    assert files.latest_complete(tmp_path).name == "step-000001" and main([str(tmp_path / "step-000001")]) == 0
