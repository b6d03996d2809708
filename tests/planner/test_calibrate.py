"""Calibration: runs made up from known coefficients give these back."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
import yaml

from launch.cli.main import main
from launch.cluster.calibration import with_coefficients
from launch.cluster.file import load_cluster
from launch.cluster.spec import ClusterSpec
from launch.coefficients.site import SiteCoefficients
from launch.config.load import LoadedConfig, load_config
from launch.errors import UserError
from launch.plan.plan import Plan
from launch.planner.calibrate.calibrate import Calibration, calibrate, phase_seconds
from launch.planner.from_config import problem_of, workload_of
from launch.planner.here import pinned_candidate, this_machine
from launch.planner.prepare import PreparedForecast, prepare, prepare_for
from launch.planner.search.candidate import Candidate

HERE = "configs/clusters/local-cpu.yaml"
TINY = "configs/tiny/grpo.yaml"
RECIPE = ("algorithm.old_logprobs=recompute", "algorithm.kl.beta=0.01", "workload.prompt_tokens=4",
          "workload.response.distribution=fixed", "workload.response.mean=2")
FIXED = {"rl.update_s": 0.01, "rl.response_s": 1e-4, "sync.pause_s": 0.02, "sync.barrier_s": 0.01}
TRUTH = {**FIXED, "rl.train_efficiency": 0.41, "rl.logprob_factor": 1.3, "rl.rollout_efficiency": 0.57,
         "sync.pause_s": 0.05, "sync.barrier_s": 0.025}
RANGED = ("rl.train_efficiency", "rl.logprob_factor", "rl.rollout_efficiency")
NOISE = (1.0, 0.9, 1.2, 0.7, 1.0, 1.05, 1.4)
"""Median 1."""


@pytest.fixture
def file(tmp_path) -> str:
    """A cluster file of this machine with fixed costs that are known."""
    return cluster_file(tmp_path / "site.yaml", FIXED)


def cluster_file(path: Path, values: dict[str, float]) -> str:
    path.write_text(Path(HERE).read_text(encoding="utf-8").partition("\ncoefficients:")[0])
    with_coefficients(path, {f"coefficients.{key}": value for key, value in (values | ends_of(values)).items()},
                      "known")
    return str(path)


def ends_of(values: dict[str, float]) -> dict[str, float]:
    """Of coefficients that are known exactly."""
    return {f"{key}{end}": values[key] for key in RANGED if key in values for end in ("_low", "_high")}


def coefficients(file: str) -> dict[str, float]:
    return {key.removeprefix("coefficients."): value for key, value in load_cluster(file).coefficients.items()}


def write_attempt(folder: Path, loaded: LoadedConfig, plan: Plan, phases: dict[str, float], *, response: float,
                  prompt: float, transfer: float = 0.001, steps: int = len(NOISE), slower: float = 1.0) -> Path:
    """An attempt that took `phases` in the median, after two steps of warm-up that took ten times as long."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(loaded.config.model_dump(mode="json"), sort_keys=False))
    (folder / "plan.json").write_text(plan.model_dump_json())
    rows = []
    for step, noise in enumerate((10.0, 10.0, *NOISE[:steps]), start=1):
        took = {name: seconds * noise * slower for name, seconds in phases.items()}
        rows.append({"step": step, "time/rollout": took["rollout"], "time/reward": took.get("reward", 0.0),
                     "time/logprob": took.get("log-prob", 0.0), "time/train": took["train"],
                     "time/sync": took["sync"], "time/step": sum(took.values()), "sync/seconds": transfer * noise,
                     "response/length_mean": response, "prompt/length_mean": prompt})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tiny_run(folder: Path, truth: dict[str, float], *words: str, slower: float = 1.0,
             steps: int = len(NOISE)) -> Path:
    """A run of the tiny configuration on a machine with the coefficients `truth`, planned without knowing them."""
    planned = prepare(TINY, (*RECIPE, *words), "cpu")
    site = cluster_file(folder.with_suffix(".truth.yaml"), truth)
    real = prepare(TINY, (*RECIPE, *words, f"cluster={site}"), "cpu")
    phases = {phase.name: phase.seconds for phase in real.plan.forecast.phases}
    phases["log-prob"] = phases.pop("logprob", 0.0) + phases.pop("reference", 0.0)
    lengths = {number.key: number.value for number in planned.plan.forecast.numbers}
    write_attempt(folder / "attempts" / "1", planned.loaded, planned.plan, phases, slower=slower, steps=steps,
                  response=lengths["workload.response_mean"], prompt=lengths["workload.prompt_tokens"])
    return folder


def test_one_run_gives_the_slopes_back_and_keeps_the_fixed_costs(file, tmp_path):
    found = calibrate(tiny_run(tmp_path / "run", TRUTH), file)
    fitted = {key: value for key, value in coefficients(file).items() if not key.endswith(("_low", "_high"))}
    assert fitted == pytest.approx(TRUTH, rel=1e-5)
    assert load_cluster(file).sources["coefficients.rl.train_efficiency"].startswith(str(tmp_path / "run") + " (")
    for phase in found.phases:
        for run in phase.runs:
            assert run.after == pytest.approx(run.measured, rel=1e-5)
            assert run.before != pytest.approx(run.measured, rel=0.2)


def test_runs_of_different_sizes_give_slopes_and_fixed_costs_back(file, tmp_path):
    truth = {**TRUTH, "rl.update_s": 0.07, "rl.response_s": 7e-4}
    first = tiny_run(tmp_path / "a", truth)
    second = tiny_run(tmp_path / "b", truth, "algorithm.prompts_per_step=64", "rollout.max_new_tokens=40",
                      "workload.response.mean=24", "rollout.max_num_seqs=64")
    calibrate(first, file, second)
    found = coefficients(file)
    assert {key: found[key] for key in truth} == pytest.approx(truth, rel=1e-4)


def test_a_range_keeps_its_distance_from_its_value(file, tmp_path):
    calibrate(tiny_run(tmp_path / "run", TRUTH), file)
    old, new = SiteCoefficients().rl, coefficients(file)
    for name in ("train_efficiency", "rollout_efficiency", "logprob_factor"):
        for end in ("_low", "_high"):
            assert new[f"rl.{name}{end}"] / new[f"rl.{name}"] == pytest.approx(
                getattr(old, name + end) / getattr(old, name), rel=1e-4)


def test_a_slower_site_has_a_lower_efficiency_by_as_much_as_is_not_fixed(file, tmp_path):
    slower = 1.5
    found = calibrate(tiny_run(tmp_path / "run", TRUTH, slower=slower), file)
    train = next(phase for phase in found.phases if phase.phase == "train").runs[0].measured / slower
    fixed = TRUTH["rl.update_s"]
    expected = TRUTH["rl.train_efficiency"] * (train - fixed) / (slower * train - fixed)
    assert coefficients(file)["rl.train_efficiency"] == pytest.approx(expected, rel=1e-5)


def test_a_fixed_cost_beyond_what_was_measured_is_refuted_and_said_so(tmp_path):
    file = cluster_file(tmp_path / "h100.yaml", {"rl.update_s": 1.1, "rl.response_s": 1e-4})
    found = calibrate(tiny_run(tmp_path / "run", TRUTH), file)
    train = next(phase for phase in found.phases if phase.phase == "train")
    assert "second run" in train.note and "rl.update_s = 1.1" in train.note
    assert train.runs[0].after == pytest.approx(train.runs[0].measured, rel=1e-5)
    assert coefficients(file)["rl.update_s"] == pytest.approx(train.runs[0].measured / 2, rel=1e-5)


def test_what_a_run_does_not_have_is_left_and_said_so(file, tmp_path):
    lean = ("algorithm.old_logprobs=none", "algorithm.kl.beta=0")
    found = calibrate(tiny_run(tmp_path / "run", TRUTH, *lean), file)
    logprob = next(phase for phase in found.phases if phase.phase == "log-prob")
    assert logprob.changes == () and logprob.note == "no run has a log-prob pass"
    assert "rl.logprob_factor" not in coefficients(file)


def test_measured_lengths_take_the_place_of_assumed_ones(file, tmp_path):
    """The run's plan assumed one token; the machine is right, and the responses were longer."""
    run = tiny_run(tmp_path / "run", TRUTH)
    config = run / "attempts" / "1" / "config.yaml"
    config.write_text(config.read_text().replace("mean: 2", "mean: 1"))
    calibrate(run, file)
    assert coefficients(file)["rl.train_efficiency"] == pytest.approx(TRUTH["rl.train_efficiency"], rel=1e-5)


@pytest.mark.parametrize("mean, cap, distribution", [(1.25, 2, "lognormal"), (1.993, 2, "fixed"),
                                                     (2.0, 2, "lognormal"), (300.5, 1024, "lognormal"),
                                                     (1.0, 2, "fixed")])
def test_measured_lengths_have_the_mean_that_was_measured(mean, cap, distribution):
    asked = [f"rollout.max_new_tokens={cap}", f"workload.response.distribution={distribution}",
             "workload.response.mean=null"]
    workload = workload_of(load_config(TINY, asked)).with_means(mean, 3.5)
    assert (workload.lengths.mean, workload.prompt_tokens) == (pytest.approx(mean, rel=1e-6), 3.5)


def test_everything_else_in_the_file_stays(file, tmp_path):
    before = Path(file).read_text().splitlines()
    calibrate(tiny_run(tmp_path / "run", TRUTH), file)
    after = Path(file).read_text().splitlines()
    is_value = [": {value:" in line for line in before]
    assert [line for line, value in zip(before, is_value, strict=True) if not value] == \
        [line for line in after if ": {value:" not in line]
    assert any(line.lstrip().startswith("#") for line in after)


def again(prepared: PreparedForecast, machine: ClusterSpec) -> Candidate:
    """The plan of a configuration, computed once more on a machine."""
    resolved = prepared.loaded.resolved(prepared.plan.chosen)
    problem = problem_of(resolved, prepared.plan.architecture, machine)
    return pinned_candidate(problem, prepared.plan, prepared.plan.forecast.split.mode)


def cluster_run(folder: Path, truth_file: str, cluster_file: str, *words: str) -> Path:
    """A run of the 7B configuration on two nodes, as the planner lays it out."""
    loaded = load_config("configs/7b/grpo.yaml", ["algorithm.max_staleness=0", f"cluster={cluster_file}", *words])
    planned = prepare_for(loaded, load_cluster(cluster_file))
    taken = again(planned, load_cluster(truth_file))
    write_attempt(folder / "attempts" / "1", planned.loaded, planned.plan, phase_seconds(taken), response=1024,
                  prompt=256, transfer=taken.sync.cost.wire_s)
    return folder


def test_a_run_on_a_cluster_also_gives_the_nics_efficiency_back(tmp_path):
    truth = {"rl.train_efficiency": 0.6, "rl.rollout_efficiency": 0.7, "sync.nic_efficiency": 0.63,
             "sync.pause_s": 0.5, "sync.barrier_s": 0.14}
    for name in ("truth", "site"):
        shutil.copy("configs/clusters/h100x2.yaml", tmp_path / f"{name}.yaml")
    with_coefficients(tmp_path / "truth.yaml", truth | ends_of(truth), "known")
    site = str(tmp_path / "site.yaml")
    calibrate(cluster_run(tmp_path / "run", str(tmp_path / "truth.yaml"), site, "placement.mode=disaggregated"), site)
    found = coefficients(site)
    assert {key: found[key] for key in truth} == pytest.approx(truth, rel=1e-4)


def test_a_plan_computed_again_is_the_plan(tmp_path):
    """What a calibration fits is what the planner predicts: same phases for same coefficients."""
    loaded = load_config("configs/7b/grpo.yaml",
                         ["algorithm.max_staleness=0", "cluster=configs/clusters/h100x2.yaml"])
    planned = prepare_for(loaded)
    assert phase_seconds(again(planned, planned.cluster)) == pytest.approx(
        {phase.name: phase.seconds for phase in planned.plan.forecast.phases}, rel=1e-9)
    local = prepare(TINY, RECIPE, "cpu")
    machine = this_machine("cpu", local.plan, local.config.trainer.threads)
    planned = next(phase.seconds for phase in local.plan.forecast.phases if phase.name == "train")
    assert phase_seconds(again(local, machine))["train"] == planned


def broken(tmp_path: Path, what: str) -> Path:
    run = tiny_run(tmp_path / "run", TRUTH, steps=3 if what == "steps" else len(NOISE))
    attempt = run / "attempts" / "1"
    if what == "plan":
        (attempt / "plan.json").unlink()
    elif what == "not a plan":
        (attempt / "plan.json").write_text('{"schema_version": 1}')
    elif what == "forecast":
        plan = json.loads((attempt / "plan.json").read_text())
        (attempt / "plan.json").write_text(json.dumps(plan | {"forecast": None}))
    elif what == "metrics":
        (attempt / "metrics.jsonl").unlink()
    elif what == "attempts":
        shutil.copytree(attempt, run / "attempts" / "2")
    elif what == "no run":
        return tmp_path
    elif what == "nowhere":
        return tmp_path / "nowhere"
    elif what == "lengths":
        rows = [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
        (attempt / "metrics.jsonl").write_text("".join(
            json.dumps({key: value for key, value in row.items() if "length" not in key}) + "\n" for row in rows))
    elif what == "asynchronous":
        plan = json.loads((attempt / "plan.json").read_text())
        plan["forecast"]["asynchronous"] = True
        (attempt / "plan.json").write_text(json.dumps(plan))
    return run


@pytest.mark.parametrize("what, says", [
    ("plan", "holds no plan.json"), ("not a plan", "not a plan that this program reads"),
    ("forecast", "predicts nothing"), ("metrics", "holds no metrics.jsonl"), ("attempts", "2 attempts"),
    ("no run", "is not a run"), ("nowhere", "is not a run"), ("steps", "3 steps after the 2 of the warm-up"),
    ("lengths", "how long its prompts"),
    ("asynchronous", "is asynchronous")])
def test_a_run_that_cannot_be_used_is_refused_with_the_reason(file, tmp_path, capsys, what, says):
    before = Path(file).read_bytes()
    assert main(["plan", "calibrate", str(broken(tmp_path, what)), "--cluster", file]) == 2
    said = capsys.readouterr().err
    assert says in said and "fix:" in said and "Traceback" not in said
    assert Path(file).read_bytes() == before


def test_a_run_on_another_kind_of_machine_is_refused(tmp_path):
    shutil.copy("configs/clusters/h100x1.yaml", tmp_path / "h100.yaml")
    with pytest.raises(UserError, match="ran on CPU-core, .* describes H100"):
        calibrate(tiny_run(tmp_path / "run", TRUTH), str(tmp_path / "h100.yaml"))
    with pytest.raises(UserError, match="no-such.yaml"):
        calibrate(tmp_path / "run", str(tmp_path / "no-such.yaml"))


def test_the_command_prints_old_and_new_measured_and_predicted(file, tmp_path, capsys):
    run = tiny_run(tmp_path / "run", TRUTH)
    assert main(["plan", "calibrate", str(run / "attempts" / "1"), "--cluster", file]) == 0
    said = capsys.readouterr().out
    row = next(line.split() for line in said.splitlines() if line.startswith("coefficients.rl.train_efficiency "))
    expected = [SiteCoefficients().rl.train_efficiency, TRUTH["rl.train_efficiency"]]
    assert [float(word) for word in row[1:]] == pytest.approx(expected, rel=1e-3)
    train = next(line for line in said.splitlines() if line.startswith("train "))
    assert train.count(" ms") == 3 and "measured" in said and "predicted before" in said
    assert f"written to {file}" in said


def test_the_shipped_file_is_calibrated_with_runs_that_it_names():
    shipped = load_cluster(HERE)
    names = {key.removeprefix("coefficients.") for key in shipped.coefficients}
    assert {"rl.train_efficiency", "rl.rollout_efficiency", "rl.logprob_factor", "sync.pause_s"} <= names
    benched = {"coefficients.sync.copy_rate", "coefficients.sync.digest_rate"}
    for key in shipped.coefficients:
        assert ("sync bench of configs/135m" if key in benched else "configs/tiny") in shipped.sources[key]


def test_medians_are_of_the_steps_after_the_warm_up(file, tmp_path):
    run = tiny_run(tmp_path / "run", TRUTH)
    rows = [json.loads(line) for line in (run / "attempts" / "1" / "metrics.jsonl").read_text().splitlines()]
    found: Calibration = calibrate(run, file)
    measured = {phase.phase: phase.runs[0].measured for phase in found.phases}
    assert measured["train"] == statistics.median(row["time/train"] for row in rows[2:])
    assert measured["rollout"] == statistics.median(row["time/rollout"] for row in rows[2:])
