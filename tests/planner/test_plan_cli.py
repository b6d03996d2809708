"""`megatron-rl plan` as a user types it: every shipped configuration plans, and bad input is one message, never a
traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli.main import main
from launch.exit_codes import ExitCode
from launch.plan.plan import SCHEMA_VERSION, read_plan
from tests.patience import patient
from tests.planner.problems import CONFIGS, ROOT

SHIPPED = sorted(path.relative_to(ROOT).as_posix()
                 for folder in ("7b", "70b") for path in (CONFIGS / folder).glob("*.yaml"))
CLUSTERS = sorted(path.relative_to(ROOT).as_posix() for path in (CONFIGS / "clusters").glob("h100*.yaml"))
SEVENTY = "configs/70b/grpo.yaml"
SMALL = "configs/7b/grpo.yaml"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def plan(capsys):
    """(exit code, standard output, standard error) of `megatron-rl plan` with these words."""
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["plan", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err
    return run


def test_what_is_shipped():
    names = {Path(path).name for path in SHIPPED if "70b" in path}
    assert names >= {"grpo.yaml", "grpo_async.yaml", "grpo_fp8_rollout.yaml", "grpo_lora.yaml",
                     "grpo_wide_rollout.yaml"}
    assert {Path(path).stem for path in CLUSTERS} >= {f"h100x{nodes}" for nodes in (1, 2, 8, 32, 128)}


@pytest.mark.parametrize("path", SHIPPED)
def test_every_shipped_configuration_plans_on_its_cluster(plan, path):
    code, out, err = plan(path, "--json")
    assert code == 0, err
    made = json.loads(out)
    assert made["schema_version"] == SCHEMA_VERSION
    read = read_plan(made)
    assert read.forecast is not None and read.forecast.throughput.nominal > 0
    assert all(row.verdict != "no" for row in read.forecast.memory)
    assert len(read.training.ranks) == read.training.tp * read.training.pp * read.training.cp * read.training.dp


@pytest.mark.parametrize("path, cluster", [
    *((path, cluster) for path in SHIPPED
      for cluster in CLUSTERS if cluster.endswith(("x1.yaml", "x2.yaml", "x8.yaml"))),
    (SEVENTY, "configs/clusters/h100x128.yaml")])
def test_on_every_cluster_it_plans_or_says_what_would(plan, path, cluster):
    code, out, err = plan(path, "--cluster", cluster)
    if code == 0:
        table = out[:out.index("\nnext\n")]
        assert max(map(len, table.splitlines())) <= 100 and "prompts/h predicted" in table
    elif "wide_rollout" in path:        # its pinned engines are more than these clusters have GPUs
        assert code == ExitCode.USER_ERROR and "rollout.replicas" in err and "fix:" in err
    else:
        assert code == ExitCode.NO_FEASIBLE_PLAN and not out
        assert "no plan fits" in err and "fix:" in err and "predicted)" in err


def test_the_same_command_prints_the_same_bytes(plan):
    assert plan(SMALL, "--json") == plan(SMALL, "--json")
    assert plan(SMALL) == plan(SMALL)


def test_files(plan, tmp_path):
    code, _, err = plan(SMALL, "--out", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), "--trace",
                        str(tmp_path / "a.trace.json"))
    assert code == 0, err
    made = json.loads((tmp_path / "a.json").read_text())
    assert made["schema_version"] == SCHEMA_VERSION
    assert json.loads((tmp_path / "a.trace.json").read_text())
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!") and "<svg" in page and "http-equiv" not in page and not re.search(r'src="http', page)
    assert plan(SMALL, "rollout.tp=2", "--out", str(tmp_path / "b.json"))[0] == 0
    code, out, err = plan("diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert code == 0 and "prompts" in out, err


def test_explain(plan):
    code, out, _ = plan("explain", SMALL)
    assert code == 0 and "step.total_s" in out and "placement.mode" in out
    names = ("step.total_s", "memory.training.stage0.optimizer", "rollout", "gpu.hbm_bandwidth")
    blocks = []
    for name in names:
        code, out, err = plan("explain", SMALL, name)
        assert code == 0 and out.strip(), err
        blocks.append(out)
    assert plan("explain", SMALL, *names)[1] == "\n".join(blocks)
    pinned = plan("explain", SMALL, "trainer.dp=1", "trainer.dp")[1]
    assert "override 'trainer.dp=1'" in pinned and pinned == plan("explain", SMALL, "trainer.dp", "trainer.dp=1")[1]


def test_sources_are_files_and_lines(plan):
    made = json.loads(plan(SMALL, "trainer.tp=2", "--json")[1])
    sources = {number["key"]: number["source"] for number in made["forecast"]["numbers"]}
    assert "trainer.tp=2" in sources["trainer.tp"]
    assert re.search(r"h100x2\.yaml:\d+", sources["cluster.nic_bandwidth"])
    assert "datasheet" in sources["gpu.hbm_bandwidth"]
    assert "calibrated" in sources["coefficients.training.gemm_bf16"]
    assert "grpo.yaml" in sources["model.hidden"] and "grpo.yaml" in sources["workload.prompts"]


def test_target_and_sweep(plan):
    code, out, err = plan("sweep", SEVENTY, "nodes=28..30", "--target", "10000/h")
    assert code == 0, err
    assert "smallest cluster that reaches 10,000 prompts/h" in out
    code, out, _ = plan("sweep", SEVENTY, "--target", "1e9/h", "nodes=8..9")
    assert code == 0 and "none of these sizes reaches" in out
    code, out, _ = plan("sweep", SMALL, "nodes=1..3", "--json")
    points = json.loads(out)["points"]
    assert code == 0 and [point["nodes"] for point in points] == [1, 2, 3]
    rates = [point["prompts_per_hour"] for point in points]
    assert rates == sorted(rates)


@pytest.mark.parametrize("words, parts", [
    (("trainer.tp=16",), ("trainer.tp = 16", "nodes of 8 GPUs", "1, 2, 4 or 8", "placement.tp_across_nodes")),
    (("trainer.tp=16", "placement.tp_across_nodes=true"), ("trainer.tp = 16", "8 KV heads", "1, 2, 4 or 8")),
    (("trainer.tp=3",), ("trainer.tp = 3", "1, 2, 4 or 8")),
    (("trainer.vpp=4", "trainer.pp=1"), ("trainer.vpp = 4", "trainer.pp = 1")),
    (("trainer.vpp=3", "trainer.pp=4"), ("4 x 3", "80 layers", "1, 2, 4, 5, 10 or 20")),
    (("trainer.vpp=3",), ("trainer.vpp", "80 layers")),
    (("trainer.pp=81",), ("trainer.pp = 81", "layers")),
    (("trainer.dp=1000",), ("trainer.dp 1000", "256")),
    (("trainer.tp=8", "trainer.pp=8", "trainer.cp=2", "trainer.dp=2"), ("256 GPUs to train", "trainer.pp 8")),
    (("placement.training_nodes=32",), ("training_nodes = 32", "<= 31")),
    (("placement.training_nodes=31", "placement.spare_nodes=1"), ("training_nodes = 31", "<= 30")),
    (("placement.spare_nodes=32",), ("spare_nodes = 32", "<= 31")),
    (("rollout.replicas=40", "rollout.tp=8"), ("320 GPUs to roll out", "rollout.replicas 40")),
    (("rollout.tp=3",), ("rollout.tp = 3", "1, 2, 4 or 8")),
    (("rollout.tp=16",), ("rollout.tp = 16", "placement.tp_across_nodes")),
    (("trainer.token_budget=100",), ("token_budget = 100", "longest sequence", ">= 8704")),
    (("workload.prompt_tokens=600",), ("prompt_tokens = 600", "max_prompt_tokens = 512")),
    (("workload.response.mean=9000",), ("9000", "8192")),
    (("rollout.max_new_tokens=1000",), ("2048", "1000")),
    (("rollout.max_new_tokens=200000",), ("max_new_tokens", "positions")),
    (("workload.response.sigma=0",), ("sigma", "number > 0")),
    (("workload.response.sigma=9",), ("sigma", "0.01 to 5")),
    (("workload.response.distribution=file",), ("workload.response.path",)),
    (("workload.response.distribution=file", "workload.response.path=nowhere.jsonl"), ("nowhere.jsonl",)),
    (("workload.response.distribution=histogram",), ("as many counts as values",)),
    (("algorithm.group_size=0",), ("group_size", "2 or more")),
    (("algorithm.prompts_per_step=0",), ("prompts_per_step", "integer > 0")),
    (("algorithm.updates_per_batch=7",), ("updates_per_batch = 7",)),
    (("placement.mode=colocated", "algorithm.max_staleness=2"),
     ("placement.mode = colocated", "algorithm.max_staleness = 2", "algorithm.max_staleness=0 or auto")),
    (("placement.mode=hybrid", "algorithm.max_staleness=0", "algorithm.overlap=true"),
     ("placement.mode = hybrid", "algorithm.overlap = true", "algorithm.overlap=false")),
    (("rollout.deterministic=true", "algorithm.max_staleness=2"), ("depends on timing", "rollout.swap=border")),
    (("model.path=llama3-70",), ("no built-in model 'llama3-70'", "llama-3-70b")),
    (("model.path=/nowhere/at/all",), ("/nowhere/at/all",)),
    (("trainer.dtype=fp32",), ("trainer.dtype", "rollout.dtype")),
    (("--cluster", "nowhere.yaml"), ("nowhere.yaml",)),
    (("--cluster", "configs"), ("is a folder",)),
    (("--target", "many"), ("--target", "10000/h")), (("--target", "-3/h"), ("--target",)),
    (("--target", "nan"), ("--target",)),
    (("--nodelist", "node[1-2]"), ("--from-slurm",)), (("--partition", "gpu"), ("--partition", "--from-slurm")),
    (("trainer.tensor=3",), ("unknown key trainer.tensor",)), (("trainer.tp=many",), ("trainer.tp",))])
def test_bad_input_is_one_message(plan, words, parts):
    _refused(plan(SEVENTY, *words), parts)


@pytest.mark.parametrize("words, parts", [
    (("--out", "/"), ("--out", "cannot write")),
    (("--html", "/nowhere/x.html"), ("/nowhere/x.html",)), (("--trace", "/nowhere/x.json"), ("--trace",))])
def test_an_output_that_cannot_be_is_one_message(plan, words, parts):
    _refused(plan(SMALL, *words), parts)


@pytest.mark.parametrize("words, parts", [
    (("explain", SMALL, "no.such.key"), ("no.such.key", "nearest")),
    (("explain", SMALL, "step", "--gpu", "H100"), ("--gpu", "--from-slurm")),
    (("explain", SMALL, "step", "--json"), ("No such option", "--json")),
    (("sweep", SMALL), ("nodes=8..64",)), (("sweep", SMALL, "3"), ("3 is not a range", "nodes=8..64")),
    (("sweep", SMALL, "nodes=9..8"), ("nodes=8..64",)), (("sweep", SMALL, "nodes=0..8"), ("nodes=8..64",)),
    (("sweep", SMALL, "nodes=1..99999"), ("4096",)), (("sweep", SMALL, "nodes=1..2", "nodes=3..4"), ("nodes=8..64",)),
    (("sweep", SMALL, "nodes=1..2", "--html", "x.html"), ("No such option", "--html")),
    (("diff", "a"), ("Missing argument", "B.json")), (("calibrate", "runs/x"), ("Missing option", "--cluster")),
    (("calibrate", "--cluster", "x.yaml"), ("Missing argument", "RUN")),
    (("--json", "explain", SMALL), ("the command comes first: megatron-rl plan explain",))])
def test_a_verb_refuses_in_one_message(plan, words, parts):
    _refused(plan(*words), parts)


@pytest.mark.parametrize("old, new", [
    ((SMALL, "--explain"), ("explain", SMALL)), (("--explain", SMALL), ("explain", SMALL)),
    ((SMALL, "--explain", "step", "trainer.tp=2"), ("explain", SMALL, "trainer.tp=2", "step")),
    ((SMALL, "trainer.tp=2", "--explain=step", "--device", "cpu"),
     ("explain", SMALL, "trainer.tp=2", "--device", "cpu", "step")),
    (("--explain", "step", SMALL), ("explain", SMALL, "step")),
    (("--explain", SMALL, "trainer.dp=1"), ("explain", SMALL, "trainer.dp=1")),
    ((SMALL, "--target", "9/h", "--sweep", "nodes=1..2"), ("sweep", SMALL, "--target", "9/h", "nodes=1..2")),
    ((SMALL, "--sweep=nodes=1..2", "--json"), ("sweep", SMALL, "nodes=1..2", "--json")),
    (("--diff", "a.json", "b c.json"), ("diff", "a.json", "'b c.json'")),
    (("--calibrate", "runs/a", "runs/b", "--cluster", "x.yaml"),
     ("calibrate", "runs/a", "runs/b", "--cluster", "x.yaml"))])
def test_an_old_spelling_is_answered_with_the_new_command(plan, old, new):
    code, out, err = plan(*old)
    assert code == ExitCode.USER_ERROR and not out
    assert err.rstrip().endswith(f"is now a command: megatron-rl plan {' '.join(new)}")


def test_a_configuration_with_the_name_of_a_verb(plan, tmp_path, monkeypatch):
    text = (CONFIGS / "7b" / "grpo.yaml").read_text().replace("configs/", f"{CONFIGS}/")
    (tmp_path / "diff").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, out, err = plan("./diff")
    assert code == 0 and "prompts/h predicted" in out, err
    code, out, err = plan("diff")
    assert code == ExitCode.USER_ERROR and not out
    assert "Missing argument 'A.json'" in err and "megatron-rl plan ./diff" in err
    code, out, err = plan("diff", "trainer.tp=2")
    assert code == ExitCode.USER_ERROR and "megatron-rl plan ./diff" in err
    assert plan("--device", "gpu", "diff")[0] == 0       # behind an option there is no verb


def _refused(result: tuple[int, str, str], parts: tuple[str, ...]) -> None:
    code, out, err = result
    assert code == ExitCode.USER_ERROR and not out
    assert "Traceback" not in err
    for part in parts:
        assert part in err, err
    if not err.startswith("Usage"):
        assert err.startswith("error: ") and "where:" in err and "fix:" in err


@pytest.mark.parametrize("words", [(), ("nowhere.yaml",), ("diff",), ("diff", "README.md", "README.md"),
                                   ("trainer.tp=2",), ("explain",), ("explain", "step"),
                                   ("calibrate", "runs/x", "--cluster", "nowhere.yaml"),
                                   ("configs/clusters/h100x2.yaml",),
                                   ("sweep", "configs/tiny/grpo.yaml", "nodes=1..2"), ("configs",)])
def test_wrong_words_are_one_message(plan, words):
    code, out, err = plan(*words)
    assert code == ExitCode.USER_ERROR and not out and "Traceback" not in err and err.count("error:") <= 1


@pytest.mark.parametrize("content", ["{", "[]", "{}", "7", '{"schema_version": 3}', '{"schema_version": "x"}',
                                     '{"schema_version": 1, "config_hash": "x"}', "\x00"])
def test_a_diff_of_garbage(plan, tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    code, _, err = plan("diff", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    assert code == ExitCode.USER_ERROR and "a.json" in err and "fix:" in err


CLUSTER = {"nodes": {"count": 2}, "gpus": {"kind": "H100-SXM-80GB", "per_node": 8},
           "network": {"nics_per_node": 8, "nic_gbit_per_s": 400, "rails": 8}, "host": {"memory_gb": 2048}}


@pytest.mark.parametrize("section, key, value, part", [
    ("nodes", "count", 0, ">= 1"), ("nodes", "count", -2, ">= 1"), ("nodes", "names", "", "empty"),
    ("nodes", "names", "node[3-1]", "node[3-1]"), ("nodes", "names", ["a", "a"], "more than once"),
    ("nodes", "names", ["a", "b", "c"], "lists 3"),
    ("gpus", "kind", "H1000", "H100"), ("gpus", "kind", ["H100-SXM-80GB", "A100-SXM-80GB"], "one kind"),
    ("gpus", "per_node", 0, ">= 1"), ("gpus", "memory_gb", -80, "> 0"),
    ("network", "rails", 3, "rails"), ("network", "nics_per_node", 3, "does not divide"),
    ("network", "nic_gbit_per_s", 0, "> 0"), ("network", "nvlink_nodes", 3, "does not divide"),
    ("network", "switches", [{"name": "a", "nodes": 5}], "has 5 nodes"),
    ("network", "switches", [{"name": "a", "nodes": ["elsewhere"]}], "elsewhere"),
    ("network", "switches", [{"name": "a", "switches": "a", "nodes": 2}], "a"),
    ("host", "memory_gb", 0, "> 0")])
def test_a_cluster_file_that_contradicts_itself(plan, tmp_path, section, key, value, part):
    content = {name: dict(values) for name, values in CLUSTER.items()}
    content[section][key] = value
    (tmp_path / "cluster.yaml").write_text(json.dumps(content))
    code, out, err = plan(SMALL, "--cluster", str(tmp_path / "cluster.yaml"))
    assert code == ExitCode.USER_ERROR and not out, out
    assert part in err and "cluster.yaml" in err and "fix:" in err, err


@pytest.mark.parametrize("drop", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_model_config_that_lacks_a_field(plan, tmp_path, drop):
    content = json.loads((CONFIGS / "tiny" / "model" / "config.json").read_text())
    content.pop(drop)
    content["max_position_embeddings"] = 32768
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    code, _, err = plan(SMALL, f"model.path={tmp_path / 'model'}")
    assert code == ExitCode.USER_ERROR and drop in err and "Traceback" not in err


def test_plan_needs_only_the_light_packages():
    """`pip install .` on a login node: the whole verb, with everything heavy out of reach."""
    script = ("import sys, importlib.abc\n"
              "light = {'click', 'pydantic', 'pydantic_core', 'annotated_types', 'typing_extensions', "
              "'typing_inspection', "
              "'yaml', '_yaml', 'rich', 'markdown_it', 'mdurl', 'pygments', 'psutil', 'plotext', 'launch'}\n"
              "class Refuse(importlib.abc.MetaPathFinder):\n"
              "    def find_spec(self, name, path=None, target=None):\n"
              "        top = name.split('.')[0]\n"
              "        if top not in light and top not in sys.stdlib_module_names and not top.startswith('_'):\n"
              "            raise ModuleNotFoundError(f'no module named {name}', name=name)\n"
              "sys.meta_path.insert(0, Refuse())\n"
              "from launch.cli.main import main\n"
              "sys.exit(main(['plan', 'configs/70b/grpo.yaml', '--html', sys.argv[1]]))\n")
    done = subprocess.run([sys.executable, "-c", script, "/dev/null"], cwd=ROOT, capture_output=True,
                          text=True, timeout=patient(120), check=False)
    assert done.returncode == 0, done.stderr
    assert "prompts/h predicted" in done.stdout
