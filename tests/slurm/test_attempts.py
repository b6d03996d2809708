"""Attempts of a job on a real Slurm, with a workload that only steps: who takes part, and what a lost node leads to."""

from __future__ import annotations

import json
import stat

import pytest

from launch.health.ledger import Ledger
from launch.runtime.stub import newest_step
from launch.runtime.workloads.train import TOKEN_FILE
from tests.slurm.stub_run import StubRun

BAD_GPU = {"gpus": {2: {"ecc_uncorrected": 4}}}


def test_a_job_on_two_nodes_finishes_and_asks_slurm_once(slurm, tmp_path):
    run = StubRun(slurm, tmp_path, "two", 2, steps=5).submit()
    past, = run.ended(1)
    assert (past.status, past.step, past.decision, past.job_id) == ("finished", 5, "done", str(run.job))
    assert run.state["JobState"] == "COMPLETED" and newest_step(run.attempt(1).checkpoints) == 5
    placement = run.attempt(1).placement()
    assert sorted(placement.nodes) == run.given(1)
    assert len(set(placement.ports.values())) == 2, "each node has its own block: these two share a host"
    assert len(run.questions(1)) <= 2, "and the step: at most three RPCs at start"


def test_many_nodes_take_no_more_questions_than_two(slurm, tmp_path):
    run = StubRun(slurm, tmp_path, "many", 32, "trainer.dp=12", steps=2).submit()
    past, = run.ended(1, timeout_s=120)
    assert past.status == "finished" and len(run.attempt(1).placement().nodes) == 32
    assert len(run.questions(1)) <= 2


# ---- nodes that die -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def lost(slurm, tmp_path_factory) -> dict[str, tuple[StubRun, str]]:
    """Runs that lose a node, and that node: the last one of a placement, seen by the leader (`last`) or first by Slurm
    (`slow`), and the leader's own (`first`)."""
    folder = tmp_path_factory.mktemp("lost")
    last = StubRun(slurm, folder, "last", 3, "checkpoint.every=5", steps=100, step_s=0.2).submit()
    slow = StubRun(slurm, folder, "slow", 2, "run.node_silent_s=60", "run.hang_min_s=200", "checkpoint.every=5", steps=60,
                   step_s=0.2).submit()
    first = StubRun(slurm, folder, "first", 2, "checkpoint.every=5", steps=60, step_s=0.2).submit()
    for run in (last, slow, first):
        run.at_step(1, 12)
    victims = {"last": (last, last.attempt(1).placement().nodes[-1]),
               "slow": (slow, next(node for node in slow.given(1) if node != slow.state["BatchHost"])),
               "first": (first, first.state["BatchHost"])}
    (last.attempt(1).folder / TOKEN_FILE).write_text("left by the head of a node that dies", encoding="ascii")
    for _, victim in victims.values():
        slurm.kill_node(victim)
    for run, _ in victims.values():
        run.ended(2, timeout_s=150)
    return victims


def test_a_killed_node_is_found_left_out_of_a_fresh_job_and_the_run_goes_on(lost):
    run, victim = lost["last"]
    died, finished = run.history()
    assert (died.status, died.nodes, died.decision, died.exit_code) == ("node_failure", (victim,), "fresh", 76)
    assert died.successor != str(run.job) and victim in died.excluded
    assert (finished.status, finished.step, finished.job_id) == ("finished", 100, died.successor)
    assert victim not in run.given(2) and len(run.given(2)) == 3
    assert "from step 10" in run.text() or "from step 15" in run.text(), "it went on from a checkpoint"
    assert Ledger(run.folder / "ledger.json").excluded() == (victim,)
    folder = run.attempt(1).folder
    assert not (folder / TOKEN_FILE).exists() and stat.S_IMODE((folder / "job.sbatch").stat().st_mode) == 0o600


def test_a_node_whose_death_slurm_sees_first_is_not_dealt_with_twice(lost):
    """Slurm has put the job back into the queue: no fresh job beside it."""
    run, victim = lost["slow"]
    died, finished = run.history()
    assert died.status in ("node_failure", "died") and died.nodes == (victim,) and died.successor is None
    assert (finished.status, finished.step, finished.job_id) == ("finished", 60, str(run.job))
    assert [entry.node for entry in Ledger(run.folder / "ledger.json").entries()] == [victim]


def test_the_death_of_the_leaders_node_is_inferred_by_the_next_attempt(lost):
    """Slurm requeues the job by itself, after SlurmdTimeout; nobody was left to write an outcome."""
    run, victim = lost["first"]
    died, finished = run.history()
    assert (died.status, died.nodes, died.decision) == ("died", (victim,), None) and died.step >= 10
    assert (finished.status, finished.step, finished.job_id) == ("finished", 60, str(run.job))
    assert run.state["Restarts"] == "1" and run.outcome(1).status == "died"
    assert [entry.node for entry in Ledger(run.folder / "ledger.json").entries()] == [victim]


# ---- nodes that the preflight refuses ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def unfit(slurm, tmp_path_factory) -> dict[str, StubRun]:
    """Runs with a bad node: one has a spare, one may go on smaller, one may not."""
    folder = tmp_path_factory.mktemp("unfit")
    runs = {"spare": (StubRun(slurm, folder, "spare", 4, "placement.spare_nodes=1", steps=3,
                              gpus={"nodes": {"h100-002": BAD_GPU}}), "--nodelist=h100-[001-004]"),
            "short": (StubRun(slurm, folder, "short", 4, "run.min_nodes=2", steps=3,
                              gpus={"nodes": {"h100-007": BAD_GPU}}), "--nodelist=h100-[005-008]"),
            "broken": (StubRun(slurm, folder, "broken", 3, gpus={"nodes": {"h100-010": BAD_GPU, "h100-013": BAD_GPU}}),
                       "--nodelist=h100-[010-012]")}
    for run, option in runs.values():
        run.submit(option, *(["--exclude=h100-[001-009,014-032]"] if run.name == "broken" else []))
    for name, (run, _) in runs.items():
        run.ended(2 if name == "broken" else 1)
    return {name: run for name, (run, _) in runs.items()}


def test_a_bad_node_found_by_preflight_is_replaced_by_the_spare(unfit):
    run = unfit["spare"]
    past, = run.history()
    placement = run.attempt(1).placement()
    assert past.status == "finished"
    assert sorted(placement.nodes) == ["h100-001", "h100-003", "h100-004"] and placement.spares == ()
    entry, = Ledger(run.folder / "ledger.json").entries()
    assert entry.node == "h100-002" and "4" in entry.reason and entry.evidence.endswith("h100-002/preflight.json")
    with open(entry.evidence, encoding="utf-8") as file:
        found = json.load(file)["checks"]
    assert [check["check"] for check in found if check["severity"] == "critical"] == [entry.kind]


def test_a_node_short_the_job_starts_smaller(unfit):
    run = unfit["short"]
    attempt = run.attempt(1)
    assert run.history()[0].status == "finished"
    assert sorted(attempt.placement().nodes) == ["h100-005", "h100-006", "h100-008"]
    assert len(attempt.placement().rollout) == attempt.config().rollout.replicas == 16, "of three rollout nodes two"
    assert "too few fit nodes for the whole plan" in run.text()


def test_below_min_nodes_one_fresh_job_without_the_bad_node_then_it_stops(unfit):
    """A broken site must not be walked through node by node."""
    first, second = unfit["broken"].history()
    assert (first.status, first.nodes, first.decision, first.exit_code) == ("preflight", ("h100-010",), "fresh", 5)
    assert second.job_id == first.successor and {"h100-010", "h100-001", "h100-032"} <= set(first.excluded)
    assert unfit["broken"].given(2) == ["h100-011", "h100-012", "h100-013"], "the old job's exclusions stay"
    assert (second.status, second.nodes, second.decision, second.exit_code) == ("preflight", ("h100-013",), "stop", 5)


def test_an_allocation_that_differs_from_the_plan_is_refused_with_both_numbers(slurm, tmp_path):
    run = StubRun(slurm, tmp_path, "differs", 2, steps=2).submit("--nodes=3")
    past, = run.ended(1)
    assert run.state["ExitCode"] == "2:0" and (past.status, past.decision) == ("user_error", "stop")
    assert "planned for 2 nodes, given 3" in slurm.output(run.job)


@pytest.fixture(scope="module")
def replanned(slurm, tmp_path_factory) -> dict[str, StubRun]:
    """Runs that were planned for three nodes, with run.replan, and given two and four."""
    folder = tmp_path_factory.mktemp("replan")
    runs = {name: StubRun(slurm, folder, name, 3, "run.replan=true", steps=2).submit(f"--nodes={nodes}")
            for name, nodes in (("fewer", 2), ("more", 4))}
    for run in runs.values():
        run.ended(1)
    return runs


@pytest.mark.parametrize(("name", "nodes"), [("fewer", 2), ("more", 4)])
def test_with_replan_another_number_of_nodes_is_planned_for(replanned, name, nodes):
    """One node trains, as pinned; each of the others rolls out with an engine a GPU."""
    run = replanned[name]
    past, = run.history()
    placement = run.attempt(1).placement()
    assert past.status == "finished" and sorted(placement.nodes) == sorted(run.given(1)) and len(run.given(1)) == nodes
    assert {rank.node for rank in placement.training} == {placement.nodes[0]}
    assert len(placement.rollout) == 8 * (nodes - 1) == run.attempt(1).config().rollout.replicas
    assert placement.plan_fingerprint == run.attempt(1).plan().fingerprint()
