"""`megatron-rl runs` over folders as launcher and job write them."""

from __future__ import annotations

import fcntl
import json
import os

import pytest
import yaml

from launch.cli.main import main
from launch.config.load import load_config
from launch.report.diagnose.runs import UNREADABLE, list_runs
from launch.report.diagnose.status import read_status, steps_of
from launch.run.find import find_run
from tests.planner.problems import CONFIGS
from tests.report.attempts import NOW, Made

NODES = ["n1", "n2"]


def ended_at(made: Made, at: float) -> Made:
    os.utime(made.folder / "outcome.json", (at, at))
    return made


@pytest.fixture
def runs(tmp_path):
    """Five runs: finished, crashed at its second attempt, one that goes on, one that nobody hears of, one in the
    queue."""
    folder = tmp_path / "runs"
    ended_at(Made(folder, "done").ended("finished", 500), NOW - 3600)
    Made(folder, "bad").on_nodes(NODES, job="7").ended("stopped", 12)
    ended_at(Made(folder, "bad", 2).on_nodes(NODES, job="8").progress(20, "train").ended("crash", 19, "why"), NOW - 60)
    Made(folder, "going").on_nodes(NODES, job="9").checked(*NODES).placed(NODES).ray(*NODES).progress(37, "train")
    gone = Made(folder, "gone").on_nodes(NODES, job="10").progress(5, "rollout")
    for node in NODES:
        gone.beat(node, NOW - 7200)
    (folder / "queued" / "slurm").mkdir(parents=True)
    os.utime(folder / "queued", (NOW - 7200, NOW - 7200))
    (folder / ".preflight" / "x").mkdir(parents=True)            # not a run
    return folder


def test_what_is_said_of_each(runs):
    lines = {line.name: line for line in list_runs(runs, NOW)}
    told = {name: (line.state, line.step, line.steps, line.attempts, line.job) for name, line in lines.items()}
    assert told == {"done": ("FINISHED", 500, 500, 1, None), "bad": ("CRASHED", 19, 500, 2, "8"),
                    "going": ("STEP", 36, 500, 1, "9"), "gone": ("GONE", 4, 500, 1, "10"),
                    "queued": ("QUEUED", 0, None, 0, None)}
    assert (lines["done"].when, lines["bad"].when, lines["going"].when) == (NOW - 3600, NOW - 60, NOW - 5)


def test_the_state_is_that_of_status(runs):
    for line in list_runs(runs, NOW):
        if line.attempts:
            status = read_status(find_run(line.name, runs), NOW)
            assert (line.state, line.step, line.steps) == (status.state, status.step, status.steps)


@pytest.mark.parametrize("by, order", [
    ("when", ["going", "gone", "bad", "done", "queued"]), ("name", ["bad", "done", "going", "gone", "queued"]),
    ("state", ["bad", "done", "gone", "queued", "going"]), ("step", ["done", "going", "bad", "gone", "queued"])])
def test_order(runs, by, order):
    assert [line.name for line in list_runs(runs, NOW, by)] == order


def test_a_run_of_this_machine_goes_on_while_its_launcher_holds_the_lock(tmp_path):
    made = Made(tmp_path, "tiny", steps=100).progress(3, "rollout")
    with (made.run / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list_runs(tmp_path, NOW)[0].state == "STEP"
    assert list_runs(tmp_path, NOW)[0].state == "GONE"


def test_only_small_files_are_read(runs):
    """Metrics grow with the run, checkpoints lie elsewhere: a list of hundreds does not read them."""
    (runs / "going" / "attempts" / "1" / "metrics.jsonl").write_text("no JSON\n")
    assert {line.name: line.state for line in list_runs(runs, NOW)}["going"] == "STEP"


def test_a_broken_file_hides_no_other_run(runs):
    (runs / "gone" / "attempts" / "1" / "job.json").write_text("{")
    states = {line.name: line.state for line in list_runs(runs, NOW)}
    assert states["gone"] == UNREADABLE and states["going"] == "STEP" and len(states) == 5


def test_the_command(runs, capsys):
    assert main(["runs", "--dir", str(runs), "--sort", "name"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["run", "state", "step", "when", "attempts", "job"]
    assert [row[0] for row in rows[1:]] == ["bad", "done", "going", "gone", "queued"]
    assert rows[1][1:3] == ["CRASHED", "19/500"] and rows[1][-2:] == ["2", "8"] and rows[2][-1] == "-"
    assert main(["runs", "--dir", str(runs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and len(document["runs"]) == 5
    assert set(document["runs"][0]) == {"name", "state", "step", "steps", "when", "attempts", "job", "folder"}


def test_no_runs(tmp_path, capsys):
    assert main(["runs", "--dir", str(tmp_path)]) == 0 and "no runs in" in capsys.readouterr().out
    assert main(["runs", "--dir", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["tiny/grpo.yaml", "70b/grpo.yaml"])
def test_steps_of_an_attempt_are_those_of_its_configuration(tmp_path, path):
    config = load_config(CONFIGS / path).config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert steps_of(tmp_path) == config.run.steps
