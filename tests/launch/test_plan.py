from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.config.checks import check
from launch.config.load import load_config
from launch.errors import UserError
from launch.model.hf_config import from_hf_dict
from launch.model.padding import round_up, sequence_multiple
from launch.plan.layouts import layers_of_stage, rank_coordinates
from launch.plan.plan import Placement, read_plan
from launch.planner.from_config import plan_of
from launch.planner.seats.local import place_local
from launch.ports import Ports
from tests.launch.conftest import HF_CONFIGS
from tests.patience import patient

SIZES = st.sampled_from([1, 2, 3, 4])


def test_ranks_are_megatrons():
    """Against Megatron's own rank generator."""
    from megatron.core.parallel_state import RankGenerator

    for tp, cp, dp, pp in ((2, 2, 2, 2), (4, 1, 2, 2), (1, 2, 3, 2), (2, 1, 1, 4)):
        ranks = rank_coordinates(tp, cp, dp, pp)
        assert [each.rank for each in ranks] == list(range(tp * cp * dp * pp))
        generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        for axis in ("tp", "cp", "dp", "pp"):
            others = [name for name in ("tp", "cp", "dp", "pp") if name != axis]
            mine: dict[tuple, list[int]] = {}
            for each in ranks:
                mine.setdefault(tuple(getattr(each, name) for name in others), []).append(each.rank)
            assert sorted(mine.values()) == sorted(generator.get_ranks(axis))


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES)
def test_rank_formula(tp, cp, dp, pp):
    for each in rank_coordinates(tp, cp, dp, pp):
        assert each.rank == each.tp + tp * (each.cp + cp * (each.dp + dp * each.pp))


@pytest.mark.parametrize("layers, pp, vpp", [(8, 2, 2), (8, 2, 4), (12, 3, 2), (4, 4, 1), (30, 4, 1), (31, 2, 1),
                                             (7, 3, 1), (3, 1, 1)])
def test_layers_are_megatrons(layers, pp, vpp):
    """Against Megatron's own numbering, with its first/last-stage options where the layers do not divide."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages = layers_of_stage(layers, pp, vpp)
    uneven = {} if layers % pp == 0 else {"num_layers_in_first_pipeline_stage": len(stages[0][0]),
                                          "num_layers_in_last_pipeline_stage": len(stages[-1][0])}
    config = TransformerConfig(num_layers=layers, hidden_size=8, num_attention_heads=2,
                               pipeline_model_parallel_size=pp, pipeline_dtype=torch.float32,
                               virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, **uneven)
    for stage, chunks in enumerate(stages):
        for chunk, numbers in enumerate(chunks):
            virtual = chunk if vpp > 1 else None
            offset = get_transformer_layer_offset(config, virtual, stage)
            count = get_num_layers_to_build(config, virtual, stage)
            assert list(numbers) == list(range(offset, offset + count))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 130), st.integers(1, 16))
def test_any_pipeline_covers_every_layer_once_and_is_balanced(layers, pp):
    if layers < pp:
        with pytest.raises(UserError, match=f"trainer.pp <= {layers}"):
            layers_of_stage(layers, pp, 1)
        return
    stages = layers_of_stage(layers, pp, 1)
    counts = [len(chunk) for (chunk,) in stages]
    assert [number for (chunk,) in stages for number in chunk] == list(range(layers))
    assert max(counts) - min(counts) <= 1
    # The last stage, with the logits, is the heaviest only if all are equal.
    assert counts[-1] == min(counts)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.fixed_dictionaries({
    "trainer.tp": SIZES, "trainer.pp": st.integers(1, 5), "trainer.vpp": st.sampled_from([1, 1, 2]),
    "trainer.cp": SIZES, "trainer.dp": SIZES, "trainer.sequence_parallel": st.sampled_from(["true", "false"]),
    "trainer.token_budget": st.sampled_from([24, 64, 96, 512]), "rollout.tp": st.integers(1, 8),
    "rollout.replicas": SIZES, "algorithm.prompts_per_step": st.integers(1, 8),
    "algorithm.updates_per_batch": st.sampled_from([1, 1, 2])}))
def test_what_passes_the_checks_can_be_planned(run_yaml, tiny_architecture, sizes):
    """No combination of sizes ends in a traceback: it is refused with a message, or planned within its own rules."""
    loaded = load_config(run_yaml, [f"{key}={value}" for key, value in sizes.items()])
    try:
        check(loaded, tiny_architecture, "cpu")
    except UserError as error:
        assert "fix:" in str(error)
        return
    the_plan = plan_of(loaded.config, tiny_architecture, "cpu")
    training, batch = the_plan.training, the_plan.batch
    assert training.world_size == training.tp * training.cp * training.dp * training.pp
    assert sorted(layer for stage in training.layers_of_stage for chunk in stage for layer in chunk) == [0, 1, 2, 3]
    assert all(chunk for stage in training.layers_of_stage for chunk in stage)
    assert tiny_architecture.kv_heads % training.tp == 0 and training.padded_vocab % (128 * training.tp) == 0
    assert batch.token_budget % batch.sequence_multiple == 0
    assert batch.samples_per_step // batch.updates_per_batch >= training.dp


def test_vpp_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="5 layers do not divide into PP 2 x VPP 2"):
        layers_of_stage(5, 2, 2)


def test_sequence_multiple_and_padded_vocab(run_yaml, tiny_architecture):
    cases = ((2, 1, False), (2, 1, True), (2, 2, False), (2, 2, True), (1, 4, False))
    assert [sequence_multiple(*case) for case in cases] == [1, 2, 4, 8, 8]
    assert round_up(96, 256) == 256 and round_up(256, 256) == 256 and round_up(257, 256) == 512
    assert plan_of(load_config(run_yaml).config, tiny_architecture, "cpu").training.padded_vocab == 256


@pytest.mark.parametrize("device, words, shared", [
    ("cpu", [], True), ("cpu", ["trainer.share_prompts=off"], False), ("cpu", ["trainer.cp=2"], False),
    ("cpu", ["trainer.sequence_parallel=true"], False), ("gpu", [], False)])
def test_prompts_are_shared_where_the_trainer_can(run_yaml, tiny_architecture, device, words, shared):
    assert plan_of(load_config(run_yaml, words).config, tiny_architecture, device).batch.share_prompts == shared


def test_plan_is_the_same_bytes_in_another_process(run_yaml, cli):
    """No set order, hash seed, clock or environment enters the plan."""
    first = cli("plan", run_yaml, "--json", "--device", "cpu")[1]
    code = "import sys; from launch.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for seed in ("1", "2"):
        other = subprocess.run([sys.executable, "-c", code, "plan", str(run_yaml), "--json", "--device", "cpu"],
                               env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin", "HOME": "/nonexistent"},
                               capture_output=True, text=True, check=True, timeout=patient(60))
        assert other.stdout == first
    again = read_plan(json.loads(first))
    assert again.model_dump_json(indent=2) == first.rstrip("\n")
    assert again.fingerprint() == plan_of(load_config(run_yaml).config, again.architecture, "cpu").fingerprint()


def test_what_changes_the_plan_changes_its_fingerprint(run_yaml, tiny_architecture):
    prints = {plan_of(load_config(run_yaml, words).config, tiny_architecture, device).fingerprint()
              for words, device in (([], "cpu"), ([], "gpu"), (["trainer.dp=2"], "cpu"), (["run.seed=1"], "cpu"))}
    assert len(prints) == 4
    text = run_yaml.read_text()
    before = plan_of(load_config(run_yaml).config, tiny_architecture, "cpu").fingerprint()
    run_yaml.write_text("# a comment\n" + text)
    assert plan_of(load_config(run_yaml).config, tiny_architecture, "cpu").fingerprint() == before


def test_placement_on_a_cpu(run_yaml, tiny_architecture):
    the_plan = plan_of(load_config(run_yaml, ["rollout.replicas=2"]).config, tiny_architecture, "cpu")
    ports = Ports(20480)
    placement = place_local(the_plan, 3, ports)
    assert placement.attempt == 3 and placement.plan_fingerprint == the_plan.fingerprint()
    assert [(each.rank, each.gpu) for each in placement.training] == [(rank, None) for rank in range(4)]
    assert len({each.port for each in placement.training} | {placement.master_port}) == 5
    assert [(each.replica, each.gpus) for each in placement.rollout] == [(0, ()), (1, ())]
    assert placement.addresses == {"local": "127.0.0.1"}
    assert Placement.model_validate_json(placement.model_dump_json()) == placement


def test_placement_on_gpus_uses_each_once(run_yaml, tiny_architecture):
    the_plan = plan_of(load_config(run_yaml, ["rollout.replicas=2", "rollout.tp=2"]).config, tiny_architecture, "gpu")
    placement = place_local(the_plan, 1, Ports(20480), gpus=[7, 6, 5, 4, 3, 2, 1, 0])
    assert [each.gpu for each in placement.training] == [7, 6, 5, 4]
    assert [each.gpus for each in placement.rollout] == [(3, 2), (1, 0)]
    for too_few in (range(7), [0] * 8):
        with pytest.raises(UserError, match=r"needs 8 GPUs \(4 for training, 4 for rollout\)"):
            place_local(the_plan, 1, Ports(20480), gpus=too_few)


def test_more_ranks_than_lanes_are_refused(run_yaml, tiny_architecture):
    the_plan = plan_of(load_config(run_yaml, ["trainer.dp=64"]).config, tiny_architecture, "cpu")
    with pytest.raises(UserError, match="128 training ranks per machine"):
        place_local(the_plan, 1, Ports(20480))


def test_plan_verb(run_yaml, cli, tmp_path):
    out_file = tmp_path / "plan.json"
    code, out, _ = cli("plan", run_yaml, "--device", "cpu", "--out", out_file)
    assert code == 0 and max(map(len, out.splitlines())) <= 100 + len(str(run_yaml))
    for fragment in ("TP2 CP1 DP1 PP2", "16 prompts x 8 completions"):
        assert fragment in out
    assert read_plan(json.loads(out_file.read_text())).training.pp == 2
    code, _, err = cli("plan", run_yaml, "--device", "cpu", "--out", tmp_path / "no" / "plan.json")
    assert code == 2 and "cannot write" in err and "--out" in err


@pytest.mark.parametrize("name, words", [
    ("llama-3.1-70b", ["trainer.tp=8", "trainer.pp=4", "trainer.dp=4", "rollout.tp=8", "rollout.replicas=16"]),
    ("qwen2.5-7b", ["trainer.tp=4", "trainer.pp=7", "rollout.tp=4"]),
    ("smollm2-135m", ["trainer.tp=3", "trainer.pp=2", "rollout.tp=3"])])
def test_published_models_plan(run_yaml, cli, name, words):
    (run_yaml.parent / "model" / "config.json").write_text((HF_CONFIGS / f"{name}.json").read_text())
    code, out, err = cli("plan", run_yaml, "--json", "--device", "cpu", *words)
    assert code == 0, err
    the_plan = json.loads(out)
    assert len(the_plan["training"]["ranks"]) % len(the_plan["training"]["layers_of_stage"]) == 0
    assert from_hf_dict(json.loads((HF_CONFIGS / f"{name}.json").read_text())).layers == sum(
        len(chunk) for stage in the_plan["training"]["layers_of_stage"] for chunk in stage)
