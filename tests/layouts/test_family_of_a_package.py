"""The example of docs/models.md, "Adding a family", installed as a package of its own and gone through from config.json
to gradients, against Hugging Face and vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Exaone4Config, Exaone4ForCausalLM

from launch.errors import UserError
from launch.model import family
from launch.model.architecture import parameter_count
from launch.model.hf_config import from_hf_config
from launch.plan.plan import Plan
from megatron_rl.layouts.megatron import canonical_tensors
from megatron_rl.layouts.vllm import trace_layout
from megatron_rl.models.tiny import byte_tokenizer, random_model
from megatron_rl.trainer import step
from megatron_rl.weight_sync.ends.vllm_internals import offline_model
from tests.patience import patient
from tests.ranks import Rank, run_ranks
from tests.rollout.engines import engine_environment
from tests.trainer.harness import (
    TrainingRank,
    assert_gradients_equal,
    hugging_face,
    make_batch,
    make_plan,
    reinforce,
    run_config,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()


def example(kind: str) -> str:
    """The page's block of code of this kind."""
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return block


def install(site: Path, module: str, entry: str) -> Path:
    """What pip leaves of a package with one module and one entry point."""
    facts = site / "exaone_family-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "exaone_family.py").write_text(module)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: exaone-family\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(entry)
    return site


def entry_points_txt() -> str:
    """The pyproject.toml of the page as pip writes it into the installed package."""
    groups = tomllib.loads(example("toml"))["project"]["entry-points"]
    return "\n".join(f"[{group}]\n" + "\n".join(f"{name} = {at}" for name, at in points.items())
                     for group, points in groups.items())


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch):
    """Put a folder of packages on this process's path."""
    def put(site: Path) -> None:
        monkeypatch.syspath_prepend(str(site))
        family.installed.cache_clear()
    yield put
    monkeypatch.undo()
    family.installed.cache_clear()
    sys.modules.pop("exaone_family", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exaone")
    config = Exaone4Config(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, sliding_window=None,
        sliding_window_pattern=None, layer_types=["full_attention"] * 2, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        architectures=[Exaone4ForCausalLM.__name__])
    random_model(config, 0, lively=True).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def installed(tmp_path: Path, path) -> Path:
    site = install(tmp_path / "site", example("python"), entry_points_txt())
    path(site)
    return site


def test_the_command_line_knows_it_where_it_is_installed(installed: Path, model: Path) -> None:
    def check(environment: dict[str, str]) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "launch", "models", "check", str(model)], cwd=ROOT,
                              env=environment, capture_output=True, text=True, timeout=patient(60))

    without = check(dict(os.environ))
    assert without.returncode == 2 and "'Exaone4ForCausalLM' is not supported" in without.stderr
    found = check(os.environ | {"PYTHONPATH": str(installed)})
    assert found.returncode == 0, found.stderr
    assert f"exaone4, 2 layers, {sum(map(torch.numel, load_file(model / 'model.safetensors').values())):,} parameters" \
        in found.stdout


def _step(rank: Rank, config, plan: str, batch) -> tuple:
    """As a trainer actor has it: the plan, and no package (the test's processes inherit its path)."""
    sys.path = [entry for entry in sys.path if not Path(entry, "exaone_family.py").exists()]
    assert not family.installed()
    training = TrainingRank(rank, config, Plan.model_validate_json(plan))
    logprobs = training.logprobs(batch)
    training.zero_grad()
    step.run_step(training.chunks, training.plan, batch, reinforce, 1.0)
    return logprobs, training.gradients()


def test_gradients_equal_hugging_face_where_only_the_plan_is_known(installed: Path, model: Path) -> None:
    config = run_config(model, tp=2, sequence_parallel=True)
    plan, batch = make_plan(config), make_batch([17, 40, 9, 33], 320)
    logprobs_N, _, gradients = hugging_face(model, batch)
    (found_N, found), _ = run_ranks(2, _step, config, plan.model_dump_json(), batch)
    completion_N = batch.behaviour_logprobs_N != 0
    assert abs((found_N - logprobs_N)[completion_N]).max() < 5e-5
    assert_gradients_equal(found, gradients)


def test_vllm_loads_every_tensor_of_it(installed: Path, model: Path) -> None:
    architecture = from_hf_config(model)
    tensors = canonical_tensors(architecture)
    assert parameter_count(architecture) == sum(map(torch.numel, load_file(model / "model.safetensors").values()))
    with engine_environment():
        for rank in range(2):
            with offline_model(model, 2, rank, torch.float32) as blueprint:
                assert trace_layout(blueprint, tensors, torch.float32).unused == ()


@pytest.mark.parametrize("module, entry, message", [
    ("raise RuntimeError('no licence')", "exaone_family:FAMILY", "cannot be imported: RuntimeError('no licence')"),
    ("FAMILY = 3", "exaone_family:FAMILY", "is not a Family for Exaone4ForCausalLM: 3"),
    ("", "exaone_family:FAMILY", "cannot be imported: AttributeError"),
    ("", "exaone_famly:FAMILY", "cannot be imported: ModuleNotFoundError")])
def test_a_broken_package_is_named(tmp_path: Path, path, model: Path, module: str, entry: str, message: str) -> None:
    path(install(tmp_path / "site", module, f"[{family.GROUP}]\nExaone4ForCausalLM = {entry}\n"))
    with pytest.raises(UserError) as caught:
        from_hf_config(model)
    assert message in str(caught.value) and entry in str(caught.value) and caught.value.fix
