"""A job whose nodes work inside a container: every command line through a stand-in that hands on what the real program
does (`tests.slurm.fake_containers`)."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.config.load import load_config
from launch.slurm.container import folders_of, inside, mounts, without_the_host
from launch.slurm.profiles import Profile, parse_profile
from launch.slurm.step import REPOSITORY, step
from tests.slurm.fake_containers import install
from tests.slurm.rehearsing import SCRIPT_7B, rehearse

COMMAND = ["/venv/bin/python", "-m", "launch", "node", "x"]
HOSTS = {"LD_LIBRARY_PATH": "/of/the/host", "VIRTUAL_ENV": "/of/the/host", "TMPDIR": "/of/the/host"}


def profile_of(kind: str, more: str = "") -> Profile:
    container = f"container: {{kind: {kind}, image: img, mounts: ['/data', '/m:/models'], python: py}}"
    return parse_profile(f"{container}\n{more}", "p")


@pytest.fixture
def host(monkeypatch):
    for name, value in {**HOSTS, "PATH": "/of/the/host:/usr/bin", "SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7",
                        "BASH_FUNC_module%%": "() { :; }", "NCCL_DEBUG": "WARN", "TWO_LINES": "a\nb"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """With a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kind", ["pyxis", "enroot", "apptainer"])
def test_the_hosts_software_stays_outside(host, kind):
    words, environment = step(COMMAND, nodes=["n1"], cpus=8, profile=profile_of(kind, "scratch: /local"))
    assert words[-5:] == ["py", *COMMAND[1:]]
    assert not {"LD_LIBRARY_PATH", "VIRTUAL_ENV", "BASH_FUNC_module%%"} & set(environment)
    assert environment["TMPDIR"] == "/local" and environment["NCCL_DEBUG"] == "WARN"
    assert environment["PATH"].startswith("/of/the/host"), "srun and the container's program are found by it"
    assert any("/local:/local" in word for word in words)


def test_pyxis(host, tmp_path):
    words, _ = step(COMMAND, nodes=["n1"], cpus=8, profile=profile_of("pyxis", "environment: {NCCL_ALGO: Ring}"),
                    folders=[tmp_path])
    options = dict(word.split("=", 1) for word in words if word.startswith("--container-"))
    assert options["--container-image"] == "img" and options["--container-workdir"] == os.getcwd()
    assert options["--container-env"].split(",") == ["NCCL_ALGO", "PYTHONPATH"], "they win over the image's"
    mounted = options["--container-mounts"].split(",")
    assert {"/data:/data", "/m:/models"} <= set(mounted)
    for folder in (REPOSITORY, tmp_path):
        assert any(folder.is_relative_to(mount.split(":")[0]) for mount in mounted)


def test_enroot_is_told_every_name_and_no_value(host):
    words, environment = step(COMMAND, nodes=["n1"], cpus=8, profile=profile_of("enroot"))
    named = [value for option, value in itertools.pairwise(words) if option == "--env"]
    assert {"SLURMD_NODENAME", "SLURM_PROCID", "SLURM_JOB_ID", "PYTHONPATH", "NCCL_DEBUG"} <= set(named)
    assert not {"PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "TWO_LINES", "CUDA_VISIBLE_DEVICES"} & set(named)
    assert not any("=" in name for name in named) and environment["NCCL_DEBUG"] == "WARN"
    assert words[words.index("img") + 1] == "/bin/sh" and words[-6] == os.getcwd()


def test_apptainer(host):
    words, environment = step(COMMAND, nodes=["n1"], cpus=8, profile=profile_of("apptainer"))
    assert words[words.index("apptainer"):][:3] == ["apptainer", "exec", "--nv"]
    assert words[words.index("--pwd") + 1] == os.getcwd()
    assert environment["APPTAINERENV_PYTHONPATH"] == environment["PYTHONPATH"]


def test_a_mount_is_made_once_and_not_inside_another():
    assert mounts(profile_of("pyxis", "scratch: /opt/ab"), [Path("/opt/a"), Path("/opt/a/b"), Path("/opt/a")]) == [
        "/opt/a:/opt/a", "/opt/ab:/opt/ab", "/data:/data", "/m:/models"]
    assert "/tmp:/tmp" in mounts(profile_of("pyxis")), "where temporary files go"


def test_model_and_data_are_mounted(run_yaml):
    loaded = load_config(run_yaml, ["algorithm.distillation.teacher=configs/tiny/model"])
    found = {folder.resolve() for folder in folders_of(loaded.config)}
    assert Path("configs/tiny/model").resolve() in found
    assert Path(loaded.config.model.path).resolve() in found
    assert Path(loaded.config.data.train).resolve().parent in found


def test_without_a_container_nothing_is_wrapped_and_nothing_hidden(host):
    assert inside(Profile().container, COMMAND, [], {}) == COMMAND
    assert step(COMMAND, nodes=["n1"], cpus=8)[1]["LD_LIBRARY_PATH"] == "/of/the/host"
    assert "LD_LIBRARY_PATH" not in without_the_host(HOSTS)


@pytest.mark.parametrize("kind", ["pyxis", "enroot", "apptainer"])
def test_a_rehearsal_passes_through(slurm, tmp_path, scratch, kind):
    """Greeting, preflight, placement and every rank, from inside."""
    (tmp_path / "site.yaml").write_text(
        f"container: {{kind: {kind}, image: img, python: {sys.executable}}}\nscratch: {scratch}\nrefuses: [mem]\n"
        "environment: {NCCL_IB_TIMEOUT: '22'}\n")
    path = f"{install(tmp_path / 'bin')}:{slurm.environment['PATH']}"
    found = rehearse(slurm, tmp_path, SCRIPT_7B, f"run.profile={tmp_path / 'site.yaml'}",
                     variables={**HOSTS, "TMPDIR": "/tmp", "PATH": path})
    assert found.report["ok"] and len(found.said) == 16, found.output
    assert "warning profile.late: refuses of " in found.output, "the shipped script was written without it"
    for said in found.said:
        variables = said["environment"]
        assert variables["PATH"] == "/usr/bin:/bin" and "VIRTUAL_ENV" not in variables
        assert variables.get("LD_LIBRARY_PATH") in (None, "/.singularity.d/libs")
        assert str(REPOSITORY) in variables["PYTHONPATH"].split(":") and variables["NCCL_IB_TIMEOUT"] == "22"
        assert variables["TRITON_CACHE_DIR"].startswith(f"{scratch}/megatron-rl-"), "on the node's own disk"
    for file in found.attempt.folder.glob("nodes/*/preflight.json"):
        disk, = (each for each in json.loads(file.read_text())["checks"] if each["check"] == "disk.scratch")
        assert disk["evidence"].startswith(f"{scratch}:")


def test_a_scratch_folder_that_is_not_there_stops_the_job_and_is_named(slurm, tmp_path, scratch):
    """Slurm makes a TMPDIR whose parent is there; else it puts /tmp in its place and says so nowhere but in its log."""
    (tmp_path / "site.yaml").write_text(f"scratch: {scratch}/not/there\n")
    found = rehearse(slurm, tmp_path, SCRIPT_7B, f"run.profile={tmp_path / 'site.yaml'}", ends="FAILED")
    assert found.state["ExitCode"] == "5:0" and f"{scratch}/not/there does not exist" in found.output
