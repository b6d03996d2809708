from __future__ import annotations

import pytest

from launch.config.keys import all_keys
from launch.errors import UserError
from launch.slurm.profiles import IN_THE_SCRIPT, Profile, load_profile, parse_profile
from launch.slurm.step import step, step_environment
from tests.slurm_cluster import REPOSITORY
from tools.docs import slurm_page

SHIPPED = sorted((REPOSITORY / "slurm/profiles").glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_shipped_profiles_load(file):
    profile = load_profile(file)
    assert profile.container.kind == {"default": "none"}.get(file.stem, file.stem)


def test_the_default_profile_changes_nothing():
    assert load_profile(REPOSITORY / "slurm/profiles/default.yaml") == Profile() == load_profile(None)


def test_every_key_is_explained():
    page = (REPOSITORY / "docs/slurm.md").read_text(encoding="utf-8")
    assert slurm_page(page) == page, "refresh: python -m tools.docs"
    assert all(key.field.description for key in all_keys(Profile))


@pytest.mark.parametrize(("text", "what", "fix"), [
    ("contaner: {kind: pyxis}", "unknown key contaner", "did you mean container?"),
    ("container: {imgae: x}", "unknown key container.imgae", "did you mean container.image?"),
    ("container: {kind: docker}", "container.kind = 'docker' (text) is not valid",
     "one of none, pyxis, enroot, apptainer"),
    ("refuses: [exclusiv]", "refuses", "exclusive"),
    ("container: {kind: pyxis}", "without container.image", "add container.image"),
    ("container: {image: x.sif}", "no effect with container.kind = none", "pyxis, enroot or apptainer"),
    ("gpus: none\ngpu_type: h100", "gpu_type has no effect", "remove it"),
    ("modules_init: /etc/profile.d/lmod.sh", "modules_init has no effect without modules", "name modules"),
    ('modules: ["cuda\\nrm -rf x"]', "modules", "expected"),
    ("environment: {A-B: x}", "environment.A-B", "expected"),
    ("environment: {WANDB_API_KEY: abc}", "environment.WANDB_API_KEY holds a secret", "export WANDB_API_KEY before"),
    ('environment: {https_proxy: "http://me:pw@proxy:3128"}', "environment.https_proxy holds a secret", "export"),
    ("stop_margin_s: -1", "stop_margin_s = -1 (integer) is not valid", "> 0"),
    ("- a", "a site profile is a mapping", "slurm/profiles/default.yaml")])
def test_mistakes_are_named_with_their_line(text, what, fix):
    with pytest.raises(UserError) as error:
        parse_profile(text, "site.yaml")
    assert what in error.value.what and fix in error.value.fix and "site.yaml:" in error.value.where, str(error.value)


def test_what_a_script_was_not_written_with_comes_too_late():
    site = parse_profile("modules: [cuda/12.9]\ngpus: gres\nscratch: /local", "p")
    assert site.too_late("") == ("modules", "gpus") and site.too_late(site.stamp()) == ()
    edited = parse_profile("modules: [cuda/13]\ngpus: gres\nscratch: /local", "p")
    assert edited.too_late(site.stamp()) == ("modules", "gpus")
    assert Profile().stamp() == parse_profile("scratch: /local", "p").stamp() == "" and Profile().too_late("") == ()
    assert set(IN_THE_SCRIPT) < set(Profile.model_fields)


def test_no_such_file():
    with pytest.raises(UserError, match="no site profile nope.yaml"):
        load_profile("nope.yaml")


def test_a_step_is_one_task_a_node_with_all_its_cpus():
    command = ["/venv/bin/python", "-m", "launch", "node", "runs/a/attempts/1"]
    words, _ = step(command, nodes=["n1", "n2"], cpus=96)
    assert words[0] == "srun" and words[-5:] == command
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--cpus-per-task=96",
            "--export=ALL", "--mpi=none"} <= set(words)


def test_the_steps_environment(monkeypatch):
    """What `sbatch --export=NONE` and a parent step leave behind would break or bend the step."""
    options = {"SLURM_EXPORT_ENV", "SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_HOSTFILE", "SLURM_HINT",
               "SLURM_EXACT", "SLURM_OVERCOMMIT", "SLURM_THREADS_PER_CORE", "SLURM_CORE_SPEC", "SLURM_SPREAD_JOB",
               "SLURM_MPI_TYPE",
               "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_EXCLUSIVE", "SLURM_NETWORK"}
    for name in options:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    here = step_environment(parse_profile('environment: {NCCL_IB_TIMEOUT: "22"}', "p"))
    assert here["SLURM_JOB_ID"] == "7" and here["NCCL_IB_TIMEOUT"] == "22"
    assert not options & set(here)
