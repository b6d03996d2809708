"""Every kind of bad input, through the command: exit code 2, one message with what, where, value and fix, no
traceback, and nothing left running."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch import ports
from launch.exit_codes import ExitCode
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.runner import launch
from tests.job.survivors import family
from tests.patience import patient
from tests.tiny_models import make_tiny

ROOT = Path(__file__).parents[2]
FASTEST = ("trainer.tp=1", "trainer.pp=1")
"""One training rank starts fastest."""
TRAIN = (ROOT / "configs/tiny/train.jsonl").read_text(encoding="utf-8").splitlines()


@dataclass(frozen=True)
class Case:
    """One mistake: prepares files under a folder and returns the overrides that make it."""

    name: str
    make: Callable[[Path], tuple[str, ...]]
    says: tuple[str, ...]
    """What the message must hold: the culprit, its value, its key, the way out. `{folder}` is filled in."""


def truncated_model(folder: Path) -> tuple[str, ...]:
    model = make_tiny(folder / "model")
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    return f"model.path={model}", "model.init=load"


def unsupported_model(folder: Path) -> tuple[str, ...]:
    model = shutil.copytree(ROOT / "configs/tiny/model", folder / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"],
                                                            "model_type": "mamba"}), encoding="utf-8")
    return (f"model.path={model}",)


def data(lines: list[str]) -> Callable[[Path], tuple[str, ...]]:
    def make(folder: Path) -> tuple[str, ...]:
        (folder / "train.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return (f"data.train={folder / 'train.jsonl'}",)
    return make


CASES = (
    Case("unknown key", lambda _: ("trainer.lr=1e-3",),
         ("unknown key trainer.lr", "override 'trainer.lr=1e-3'", "did you mean trainer.optimizer.lr?")),
    Case("wrong type", lambda _: ("run.steps=many",),
         ("run.steps = 'many' (text) is not valid", "override 'run.steps=many'", "expected: integer > 0")),
    Case("TP that does not divide", lambda _: ("trainer.tp=3",),
         ("trainer.tp = 3 does not divide the 4 attention heads", "override 'trainer.tp=3'", "trainer.tp = 1 or 2")),
    Case("model folder missing", lambda folder: (f"model.path={folder}/nothing",),
         ("the model folder {folder}/nothing does not exist", "model.path", "set model.path to")),
    Case("model truncated", truncated_model,
         ("{folder}/model/model.safetensors is truncated or damaged", "model.path", "copy or download the file")),
    Case("unsupported architecture", unsupported_model,
         ("MambaForCausalLM", "{folder}/model/config.json", "LlamaForCausalLM")),
    Case("data set empty", data([]),
         ("the data file {folder}/train.jsonl is empty", "data.train", "at least one prompt, one per line")),
    Case("column missing", data([line.replace('"answer"', '"anwser"') for line in TRAIN]),
         ("row 0 has no 'answer'; its columns are anwser, prompt", "data.train: {folder}/train.jsonl",
          "set data.answer_column=anwser")),
    Case("prompts over the limit", lambda _: ("rollout.max_prompt_tokens=3",),
         ("80 of 80 prompts are longer than rollout.max_prompt_tokens = 3", "data.train: configs/tiny/train.jsonl",
          "set rollout.max_prompt_tokens=4 or more")),
    Case("reward that does not import", lambda _: ("reward.functions.0.function=tests.job.gradres:raises",),
         ("importing tests.job.gradres fails with ModuleNotFoundError", "reward.functions", "PYTHONPATH")),
    Case("run.dir cannot be written", lambda folder: (f"run.dir={folder}/file/runs",),
         ("{folder}/file/runs", "run.dir", "Not a directory")),
)


@dataclass(frozen=True)
class Refused:
    """A launch that has ended."""

    code: int
    text: str
    folder: Path


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> dict[str, Refused]:
    """All cases, launched at the same time, and waited for; nothing of them may be left running."""
    with family() as started:
        jobs = {}
        for case in CASES:
            folder = tmp_path_factory.mktemp("bad")
            (folder / "file").touch()
            jobs[case.name] = (launch(folder / "runs", "bad", *FASTEST, *case.make(folder)), folder)
        ended = {name: Refused(job.process.wait(patient(120)), job.text(), folder)
                 for name, (job, folder) in jobs.items()}
        assert started.left(within_s=10) == []      # Ray's agents notice the end of their raylet when they look
    return ended


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_with_one_message(case, refused):
    expect_one_message(refused[case.name], case.says)


def test_a_pinned_port_that_is_taken_is_refused(tmp_path):
    block = ports.allocate(7)
    block.release()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", block.ray_gcs))
        listener.listen()
        job = launch(tmp_path, "bad", *FASTEST, f"run.port_base={block.base}")
        ended = Refused(job.process.wait(patient(60)), job.text(), tmp_path)
    expect_one_message(ended, (f"port {block.ray_gcs} (ray_gcs) is already taken by", f"(pid {os.getpid()})",
                               f"run.port_base = {block.base}", "run.port_base=null"))


def expect_one_message(ended: Refused, says: tuple[str, ...]) -> None:
    assert ended.code == ExitCode.USER_ERROR, ended.text
    assert "Traceback" not in ended.text
    for part in says:
        assert part.format(folder=ended.folder) in ended.text
    assert [ended.text.count(word) for word in ("error: ", "  where: ", "  fix:   ")] == [1, 1, 1], ended.text


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB: one checkpoint of 4.7 MB fits, the second does not."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True,
                          text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_during_a_checkpoint_leaves_the_last_good_one(small_disk):
    with family() as started:
        job = launch(small_disk, "full", *FASTEST, "run.steps=3", "checkpoint.every=1", "checkpoint.keep=2")
        assert job.process.wait(patient(300)) == ExitCode.USER_ERROR, job.text()
        assert started.left(within_s=10) == []      # Ray's agents notice the end of their raylet when they look
    text = job.text()
    assert "no room for the checkpoint: it needs" in text and "bytes are free" in text
    assert f"where: {job.attempt.checkpoints}" in text and "run.dir moves the run" in text
    assert "Traceback" not in text
    assert [folder.name for folder in complete_checkpoints(job.attempt.checkpoints)] == ["step-000001"]
    assert [row["step"] for row in job.rows()] == [1, 2], "the step whose checkpoint failed is on record"
