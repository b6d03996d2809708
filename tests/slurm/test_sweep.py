"""A sweep goes through submitit, on a Slurm that keeps accounts and on one that does not."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.errors import UserError
from launch.run.outcome import Outcome, read_outcome, write_outcome
from launch.slurm import sweep as sweep_module
from launch.slurm.records import Queued
from launch.slurm.refusals import SlurmError
from launch.slurm.render import Flags
from launch.slurm.sweep import Shape, SubmittedPoint, parameters, state_of, wait_for
from launch.slurm.sweep_points import SweptRun, points, split
from launch.slurm.sweep_task import SweepTask, attempts_after, attempts_before, outcome_after
from tests.launcher_stub import VARIABLES
from tests.launcher_stub.process import STEP_VARIABLE
from tests.slurm.stub_run import CLUSTER, CONFIG, WORDS
from tests.slurm_accounting import NO_ACCOUNTING, missing_programs
from tests.slurm_cluster import REPOSITORY, Group, SlurmCluster, running


class TestPoints:
    def test_every_combination_with_a_run_of_its_own(self):
        found = points(["run.seed=0,1", "run.steps=10", "trainer.optimizer.lr=1e-5,2e-5"], "tiny")
        assert [point.name for point in found] == ["tiny-seed0-lr1e-5", "tiny-seed0-lr2e-5", "tiny-seed1-lr1e-5",
                                                   "tiny-seed1-lr2e-5"]
        assert found[1].words == ("run.steps=10", "run.seed=0", "trainer.optimizer.lr=2e-5",
                                  "run.name=tiny-seed0-lr2e-5")

    def test_commas_inside_brackets_and_quotes_belong_to_the_value(self):
        assert split("[1,2],'a,b',{x: 1, y: 2}") == ["[1,2]", "'a,b'", "{x: 1, y: 2}"]

    def test_the_name_may_be_given_or_swept(self):
        named = points(["run.seed=0,1", "run.name=other"], "tiny")
        assert [point.name for point in named] == ["other-seed0", "other-seed1"]
        assert [point.name for point in points(["run.name=a,b"], "tiny")] == ["a", "b"]

    @pytest.mark.parametrize("words, message", [
        (["run.seed=0"], "nothing is swept"), (["run.seed=0,0"], "repeated value"), (["run.seed=0,,1"], "an empty or"),
        (["run.seed=0,1", "run.seed=2,3"], "swept twice"),
        (["run.seed=" + ",".join(map(str, range(300)))], "300 points"),
        (["model.path=a/b,a-b"], "two points of the sweep would use the run tiny-patha-b")])
    def test_refused(self, words, message):
        with pytest.raises(UserError, match=message):
            points(words, "tiny")


def test_what_submitit_is_given():
    """No srun, no signal that kills, no requeue; the script is submitit's own."""
    submitit = pytest.importorskip("submitit")
    from submitit.slurm.slurm import _make_sbatch_string

    shape = Shape(nodes=4, gpus_per_node=8, whole_nodes=True)
    given = parameters(shape, Flags(partition="batch", account="rl", time="2:00:00", exclude="n7"), "tiny-1")
    script = _make_sbatch_string(command="python task", folder="/f/%j", map_count=2, **given)
    for line in ("#SBATCH --nodes=4", "#SBATCH --gpus-per-node=8", "#SBATCH --exclusive", "#SBATCH --mem=0",
                 "#SBATCH --time=120", "#SBATCH --signal=B:CONT@60", "#SBATCH --no-requeue", "#SBATCH --array=0-1%2",
                 "#SBATCH --account=rl", "#SBATCH --exclude=n7"):
        assert line in script.splitlines(), script
    assert "srun" not in script and submitit.__version__


def test_an_attempt_that_ended_a_moment_before_is_not_the_new_ones(tmp_path):
    def made(number: int) -> Path:
        attempt = tmp_path / "attempts" / str(number)
        attempt.mkdir(parents=True)
        return attempt

    assert attempts_before(tmp_path) == 0 and outcome_after(tmp_path, 0) is None
    for number in (9, 10):
        write_outcome(made(number), Outcome(status="crash", step=1, message=str(number)))
    before = attempts_before(tmp_path)
    assert before == 10 and attempts_after(tmp_path, before) == [] and outcome_after(tmp_path, before) is None
    attempt = made(11)
    assert attempts_after(tmp_path, before) == [attempt] and outcome_after(tmp_path, before) is None
    write_outcome(attempt, Outcome(status="finished", step=3, message="11"))
    assert outcome_after(tmp_path, before).message == "11"


class Follow:
    """Two submitted points whose jobs and queue say what a test wants."""

    def __init__(self, folder: Path, monkeypatch, *, accounts: bool) -> None:
        monkeypatch.setattr(sweep_module, "LOOK_EVERY_S", 0.01)
        monkeypatch.setattr(sweep_module, "ASK_EVERY_S", 0.05)
        monkeypatch.setattr(sweep_module, "LATE_S", 0.4)
        self.answers: list[set[str] | SlurmError] = []
        self.accounts, self.said = accounts, []
        self.members = [SubmittedPoint(SweptRun(name, (), {}, name), SweepTask(str(folder / name), (), ""),
                               SimpleNamespace(job_id=job, done=lambda: False, state="UNKNOWN"), 0)
                        for name, job in (("one", "7_0"), ("two", "7_1"))]

    def account(self, job_id: str) -> None:
        if not self.accounts:
            raise SlurmError("Slurm accounting storage is disabled")

    def queue(self) -> list[Queued]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SlurmError):
            raise answer
        return [Queued(job, "RUNNING") for job in answer]

    def ends(self, *members: int) -> None:
        """The outcome becomes visible here."""
        for member in members:
            attempt = Path(self.members[member].task.run_folder) / "attempts" / "1"
            attempt.mkdir(parents=True)
            write_outcome(attempt, Outcome(status="finished", step=3))

    def wait(self) -> list[str]:
        wait_for(self.members, self.said.append, self)
        return [state_of(member) for member in self.members]


@pytest.mark.parametrize("accounts", [True, False])
def test_an_outcome_that_becomes_visible_after_the_end_of_its_job(tmp_path, monkeypatch, accounts):
    follow = Follow(tmp_path, monkeypatch, accounts=accounts)
    follow.answers = [{"7_0", "7_1"}, {"7_1"}, set()]
    follow.ends(0)
    late = threading.Timer(0.3, follow.ends, [1])
    late.start()
    assert follow.wait() == ["finished after step 3"] * 2
    late.join()


@pytest.mark.parametrize(("accounts", "state"), [(True, "UNKNOWN"), (False, "not in the queue")])
def test_a_job_that_neither_queue_nor_accounting_knows_ends_the_waiting(tmp_path, monkeypatch, accounts, state):
    follow = Follow(tmp_path, monkeypatch, accounts=accounts)
    follow.answers = [{"7_[0-1]"}, {"7_1"}, set()]
    follow.ends(0)
    assert follow.wait() == ["finished after step 3", f"ended without an outcome: {state}"]


def test_a_controller_that_does_not_answer_has_not_ended_a_job(tmp_path, monkeypatch):
    follow = Follow(tmp_path, monkeypatch, accounts=False)
    follow.answers = [{"7_0", "7_1"}, *[SlurmError("slurmctld is away")] * 15, {"7_0", "7_1"}]
    follow.ends(0)
    late = threading.Timer(1.2, follow.ends, [1])
    late.start()
    assert follow.wait() == ["finished after step 3"] * 2
    assert [line for line in follow.said if "is away" in line] == ["slurmctld is away: trying again every 0.05 s"]
    late.join()


@pytest.fixture(scope="module")
def accounted() -> Iterator[SlurmCluster]:
    """Four nodes, with slurmdbd."""
    missing = missing_programs(os.environ["PATH"] + ":/usr/sbin:/sbin")
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{NO_ACCOUNTING}: {', '.join(missing)}")
    with running([Group("h100", 4)], accounting=True) as cluster:
        yield cluster


def sweep(cluster: SlurmCluster, folder: Path, *words: str, check: bool = True, **variables: str):
    """Two points of two nodes each, followed to their ends."""
    (folder / "cluster.yaml").write_text(CLUSTER.format(nodes=2), encoding="utf-8")
    variables = {**VARIABLES, STEP_VARIABLE: "0.05", **variables}
    return cluster.run(sys.executable, "-m", "launch", "launch", CONFIG, f"cluster={folder}/cluster.yaml",
                       f"run.dir={folder}/runs", "run.steps=3", *WORDS, *words, "--on", "slurm", "--time", "10:00",
                       "--sweep", "--wait", timeout_s=120, variables=variables, check=check)


@pytest.mark.slurm
def test_seeds_on_a_slurm_with_accounting(accounted, tmp_path):
    done = sweep(accounted, tmp_path, "run.seed=0,1,2")     # the third waits for nodes when the first has finished
    lines = done.stdout.splitlines()
    assert [line.partition(" ")[2].strip() for line in lines] == [f"tiny-seed{seed}  finished after step 3"
                                                                  for seed in (0, 1, 2)]
    array = lines[0].partition("_")[0]
    for seed in (0, 1):
        attempt = tmp_path / "runs" / f"tiny-seed{seed}" / "attempts" / "1"
        assert read_outcome(attempt).status == "finished" and f"seed: {seed}" in (attempt / "config.yaml").read_text()
        job = json.loads((attempt / "job.json").read_text())
        assert len(job["nodes"]) == 2 and accounted.job(int(job["job_id"]))["Requeue"] == "0"
    ask = ("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", array, "--format=JobID,State")
    whole = [f"{array}_{task}|COMPLETED" for task in range(3)]
    accounted.wait_until(lambda: sorted(accounted.run(*ask).stdout.split()) == whole, "complete accounts", 20)
    record = json.loads((tmp_path / "runs" / "sweeps" / "tiny-1" / "sweep.json").read_text())
    assert [point["values"] for point in record["points"]] == [{"run.seed": seed} for seed in "012"]
    status = accounted.run(sys.executable, "-m", "launch", "status", f"{array}_1", "--dir", str(tmp_path / "runs"),
                           variables={"PYTHONPATH": str(REPOSITORY)})
    assert status.stdout.startswith("tiny-seed1") and "FINISHED" in status.stdout


def test_without_accounting_the_files_and_the_queue_tell(slurm, tmp_path):
    """Both points fail in step 2: each is tried once, and the sweep says so."""
    done = sweep(slurm, tmp_path, "run.seed=0,1", check=False, MEGATRON_RL_FAULT="trainer-0:step:2:raise")
    assert done.returncode == 70, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("crash after step 1: trainer-0 failed first: Runtime" in line for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert [path.name for path in (tmp_path / "runs" / "tiny-seed1" / "attempts").iterdir()] == ["1"]
    again = sweep(slurm, tmp_path, "run.seed=0,1")      # the same sweep goes on where it was
    assert again.stdout.count("finished after step 3") == 2
    assert (tmp_path / "runs" / "tiny-seed1" / "attempts" / "2" / "outcome.json").exists()


def test_nothing_is_submitted_if_one_point_is_wrong(slurm, tmp_path):
    done = sweep(slurm, tmp_path, "trainer.dp=2,3", check=False)
    assert done.returncode in (2, 3) and "Traceback" not in done.stderr and done.stdout == ""
    assert slurm.jobs() == [] and not (tmp_path / "runs" / "sweeps").exists()


def test_dry_run_shows_every_point(slurm, tmp_path):
    done = sweep(slurm, tmp_path, "run.seed=0,1", "--dry-run")
    assert done.stdout.startswith("tiny-seed0: 2 nodes with 8 GPUs: job configs/tiny/grpo.yaml ")
    assert slurm.jobs() == []
