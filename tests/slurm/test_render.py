from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch.config.load import load_config
from launch.errors import UserError
from launch.plan.forecast import DiskForecast
from launch.planner import prepare as preparing
from launch.planner.prepare import prepare, prepare_for, prepare_job
from launch.slurm.margin import PORTABLE_S, needed, stop_margin
from launch.slurm.profiles import Profile, parse_profile
from launch.slurm.render import Flags, Places, comment_of, plan_hash_of, render
from tests.patience import patient
from tests.slurm_cluster import REPOSITORY

CONFIG = "configs/7b/grpo.yaml"
GOLDEN = Path(__file__).parent / "golden"
SHIPPED = sorted((REPOSITORY / "slurm").glob("*.sbatch"))
SCRIPTS = {"grpo_7b": "configs/7b/grpo.yaml", "grpo_70b": "configs/70b/grpo.yaml"}
LOGIC = re.compile(r"\$\(\(|\(\(|\blet\b|\bexpr\b|\btrap\b|\b(?:for|while|until|case|if|wait|sleep|eval|srun)\b|`|"
                   r"&\s*$|SLURM_PROCID|\$0|dirname")
"""Arithmetic, traps, loops, and what is known to go wrong in batch scripts."""
SITE = """\
container: {kind: apptainer, image: /img/a.sif, mounts: [/data]}
modules: [cuda/12.9, "gcc/13"]
modules_init: /etc/profile.d/lmod.sh
python: /opt/python 3/bin/python
environment: {NCCL_IB_TIMEOUT: "22", NOTE: "it's $HOME"}
gpus: gres
gpu_type: h100
refuses: [exclusive, mem, requeue]
segment: 2
sbatch: [--constraint=ib]
"""


def portable(config: str) -> str:
    """The script that is shipped for a configuration: no site, no absolute path, any overrides."""
    prepared = prepare_for(load_config(config))
    return render(config, (), prepared.config, prepared.plan, Profile())


@functools.cache
def planned(config: str):
    return prepare_for(load_config(config))


@pytest.fixture(scope="module")
def prepared():
    return planned(CONFIG)


def rendered(prepared, words=(), **how) -> str:
    return render(CONFIG, words, prepared.config, prepared.plan, how.pop("profile", Profile()), **how)


def site_script(prepared) -> str:
    """Every line that a site, the flags and the plan can ask for."""
    return rendered(
        prepared, ["run.steps=5", "data.system=You're here"], profile=parse_profile(SITE, "site.yaml"),
        flags=Flags(partition="gpu", account="physics", qos="high", reservation="r1", time="2-0", exclude="n[1-2]"),
        places=Places(root="/opt/megatron rl", work_dir="/home/a b", output="/home/runs/%j.log"), margin_s=420,
        plan_hash="0123456789abcdef")


def code(script: str) -> list[str]:
    return [line for line in script.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_shipped_scripts_are_what_the_launcher_writes(name):
    text = (REPOSITORY / f"slurm/{name}.sbatch").read_text(encoding="utf-8")
    assert text == portable(SCRIPTS[name]), "refresh: python -m tests.slurm.test_render"


def started(script: Path) -> tuple[str, list[str], dict[str, str]]:
    """What a shipped script starts: the configuration, its words, and its directives."""
    lines = script.read_text(encoding="utf-8").splitlines()
    _, _, _, _, _, config, *words, users = shlex.split(lines[-1])
    assert users == "$@"
    return config, words, dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", "\n".join(lines), re.MULTILINE))


@pytest.mark.parametrize("script", SHIPPED, ids=lambda script: script.name)
def test_a_shipped_script_starts_what_this_version_trains(script, monkeypatch):
    """All checks that a run makes before it starts, but for the weights and the data, which a clone does not hold; and
    the allocation that the script asks for is the plan's."""
    config, words, asked = started(script)
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(UserError) as error:
        prepare_job(config, words)
    assert "model folder" in error.value.what and "does not exist" in error.value.what, error.value
    monkeypatch.setattr(preparing.locate, "check_model_files", lambda loaded: None)
    monkeypatch.setattr(preparing.locate, "check_data_files", lambda loaded: None)
    made = prepare_job(config, words)
    split = made.plan.forecast.split
    assert int(asked["nodes"]) == split.training + split.rollout + made.config.placement.spare_nodes
    assert int(asked["gpus-per-node"]) == made.plan.forecast.cluster.gpus_per_node
    assert asked["signal"] == f"B:USR1@{PORTABLE_S}" and asked["job-name"] == made.config.run.name
    assert stop_margin(made.config, made.plan, Profile()) <= PORTABLE_S


def test_golden(prepared):
    script = site_script(prepared)
    golden = (GOLDEN / "site.sbatch").read_text(encoding="utf-8")
    assert script == golden, "refresh: python -m tests.slurm.test_render"


@pytest.mark.parametrize("profile", ["", SITE])
def test_bash_holds_no_logic(prepared, profile):
    script = rendered(prepared, profile=parse_profile(profile, "p") if profile else Profile())
    lines = code(script)
    assert not [line for line in lines if LOGIC.search(line)]
    assert sum("exec " in line for line in lines) == 1 and lines[-1].startswith("exec ")
    assert len(lines) <= 12


@pytest.mark.parametrize("line", ["x=$((1+1))", "trap : USR1", "for a in b; do", "wait $pid", "python3 x &",
                                  "srun x"])
def test_the_search_for_logic_finds_it(line):
    assert LOGIC.search(line)


@pytest.mark.parametrize("word, refused", [
    ("reward.functions.0.args.api_key=abc", True), ("reward.functions.0.args.url=https://me:pw@host/v1", True),
    ("reward.functions.0.args.max_tokens=512", False), ("reward.functions.0.args.tokenizer=a/b", False),
    ("rollout.max_new_tokens=auto", False)])
def test_a_secret_in_the_words_is_refused(prepared, word, refused):
    """`scontrol show job` prints them to everybody."""
    if not refused:
        assert word in rendered(prepared, [word])
        return
    with pytest.raises(UserError, match="holds a secret") as error:
        rendered(prepared, [word])
    assert word.partition("=")[2] not in str(error.value)


@pytest.mark.parametrize("option, directive", [
    ("exclusive", "--exclusive"), ("mem", "--mem=0"), ("requeue", "--requeue"), ("signal", "--signal"),
    ("dependency", "--dependency"), ("comment", "--comment"), ("open_mode", "--open-mode"),
    ("ntasks_per_node", "--ntasks-per-node")])
def test_a_refused_option_is_left_out_and_nothing_else(prepared, option, directive):
    plain = rendered(prepared, plan_hash="0" * 16).splitlines()
    without = rendered(prepared, plan_hash="0" * 16, profile=parse_profile(f"refuses: [{option}]", "p")).splitlines()
    missing = [line for line in plain if line not in without]
    assert len(missing) == 1 and missing[0].startswith(f"#SBATCH {directive}")


@pytest.mark.parametrize("text, line", [
    ("gpus: gres", "#SBATCH --gres=gpu:8"),
    ("gpus: gpus_per_node\ngpu_type: h100", "#SBATCH --gpus-per-node=h100:8")])
def test_how_gpus_are_asked_for(prepared, text, line):
    script = rendered(prepared, profile=parse_profile(text, "p"))
    assert line in script.splitlines() and script.count("gpus-per-node") + script.count("gres") == 1
    assert "gpu" not in rendered(prepared, profile=parse_profile("gpus: none", "p")).replace(".venv-gpu", "")


def test_spares_are_nodes_beyond_the_plan():
    more = prepare(CONFIG, ["placement.spare_nodes=1", "cluster=configs/clusters/h100x8.yaml",
                            "placement.training_nodes=1"])
    used = more.plan.forecast.split.training + more.plan.forecast.split.rollout
    script = render(CONFIG, (), more.config, more.plan, Profile())
    assert f"#SBATCH --nodes={used + 1}" in script.splitlines() and "1 of them spare" in script


def run_script(script: str, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script as the batch shell does, with a python3 that prints its words and where it is."""
    fake = folder / "bin/python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$PWD" "$PYTHONPATH" "$@"\n')
    fake.chmod(0o755)
    file = folder / "slurm_script"
    file.write_text(script)
    return subprocess.run(["/bin/bash", str(file), *words], capture_output=True, text=True, timeout=patient(20),
                          cwd="/",
                          env={"PATH": f"{fake.parent}:/usr/bin:/bin", **variables})


@pytest.fixture
def checkout(tmp_path) -> Path:
    root = tmp_path / "my checkout"
    (root / "launch").mkdir(parents=True)
    (root / "launch/__init__.py").touch()
    return root


@pytest.mark.parametrize("variable", ["SLURM_SUBMIT_DIR", "MEGATRON_RL_ROOT"])
def test_the_root_is_found_and_words_arrive_whole(prepared, checkout, tmp_path, variable):
    elsewhere = {"SLURM_SUBMIT_DIR": "/", variable: str(checkout)}
    script = rendered(prepared, ["data.system=it's me"])
    done = run_script(script, tmp_path, "run.name=a b", "trainer.tp=8", **elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(checkout), str(checkout), "-m", "launch", "job", CONFIG,
                                        "data.system=it's me", "run.name=a b", "trainer.tp=8"]


def test_another_folder_than_the_repository_is_refused(prepared, tmp_path):
    done = run_script(rendered(prepared), tmp_path, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert f"no launch/__init__.py in {tmp_path}: submit from the root of the repository" in done.stderr


def test_a_script_for_one_place_works_from_everywhere(prepared, checkout, tmp_path):
    places = Places(root=str(checkout), work_dir=str(tmp_path), python=str(tmp_path / "bin/python3"))
    done = run_script(rendered(prepared, places=places), tmp_path, SLURM_SUBMIT_DIR="/", PYTHONPATH="/mine")
    assert done.stdout.splitlines()[:2] == [str(tmp_path), f"{checkout}:/mine"], done.stderr


def test_modules_are_loaded_where_a_batch_shell_has_no_such_command(prepared, checkout, tmp_path):
    init = tmp_path / "modules of the site.sh"
    init.write_text('module() { [[ "$1 $2" == "load cuda/12.9" ]] && export MODULES="$UNSET$2"; }\n')
    loads = f"modules: [cuda/12.9]\nmodules_init: {init}"
    done = run_script(rendered(prepared, profile=parse_profile(loads, "p")), tmp_path, SLURM_SUBMIT_DIR=str(checkout))
    assert done.returncode == 0, done.stderr
    for text, said in (("modules: [cuda/12.9]", "without a command named module, set modules_init"),
                       (f"{loads}.absent", "modules_init of the site profile cannot be read"),
                       (loads.replace("12.9]", "13]"), "the modules of the site profile cannot be loaded")):
        done = run_script(rendered(prepared, profile=parse_profile(text, "p")), tmp_path,
                          SLURM_SUBMIT_DIR=str(checkout))
        assert done.returncode == 2 and said in done.stderr and done.stdout == ""


def test_the_plans_hash_in_the_comment():
    assert plan_hash_of(f"mine {comment_of('0123456789abcdef')}") == "0123456789abcdef"
    assert plan_hash_of("") is plan_hash_of("megatron-rl") is None and "=" not in comment_of("0" * 16)


def test_the_margin_is_what_the_plan_needs(prepared):
    """14 bytes a parameter (bf16 weight, fp32 master weight, two moments), at the site's rate."""
    config = prepared.config
    need = needed(prepared.plan, Profile(file_system_gb_per_s=2.0))
    parameters = {number.key: number.value for number in prepared.plan.forecast.numbers}["model.parameters"]
    assert 7e9 < parameters < 8e9 and need.checkpoint_bytes == 14 * parameters
    write, step = 14 * parameters / 2e9, prepared.plan.forecast.step_high_s
    assert write > step, "the checkpoint before the last step is still being written at its end"
    total = step + (write - step) + write + 60
    assert need.total_s == pytest.approx(total)
    margin = stop_margin(config, prepared.plan, Profile(file_system_gb_per_s=2.0))
    assert margin % 60 == 0 and total <= margin < total + 60
    assert stop_margin(config, prepared.plan, Profile(stop_margin_s=9000.0)) == 9000


def test_a_version_that_is_being_written_to_disk_is_waited_for(prepared):
    forecast = prepared.plan.forecast
    sync = forecast.sync.model_copy(update={"disk": DiskForecast(every=10, bytes=15 * 10**9, seconds=1.0)})
    plan = prepared.plan.model_copy(update={"forecast": forecast.model_copy(update={"sync": sync})})
    profile = Profile(file_system_gb_per_s=2.0)
    need = needed(plan, profile)
    assert need.disk_s == 15 and need.total_s == pytest.approx(
        max(forecast.step_high_s + 15, need.checkpoint_s) + need.checkpoint_s + 60)
    assert " + 15 s (a version to disk) + " in need.text


def test_a_margin_that_is_too_short_is_refused_with_the_sum(prepared):
    run = prepared.config.run
    config = prepared.config.model_copy(update={"run": run.model_copy(update={"stop_margin_s": 61.0})})
    need = needed(prepared.plan, Profile())
    with pytest.raises(UserError) as error:
        stop_margin(config, prepared.plan, Profile())
    assert error.value.what == f"run.stop_margin_s = 61 is too short: a stop needs {need.text}"
    assert [int(number) for number in re.findall(r"(\d+) s\b", need.text)] == [
        round(need.step_s), round(need.earlier_s), round(need.checkpoint_s), 60, round(need.total_s)]


def refresh() -> None:
    for name, config in SCRIPTS.items():
        (REPOSITORY / f"slurm/{name}.sbatch").write_text(portable(config), encoding="utf-8")
    made = planned(CONFIG)
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "site.sbatch").write_text(site_script(made), encoding="utf-8")


if __name__ == "__main__":
    refresh()
