"""Attempts of a job on a real Slurm, with a workload that only steps: who takes part, and what a lost node leads to."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from launch.health.ledger import Ledger
from launch.run.node_files import vanished
from launch.runtime.workloads.train import TOKEN_FILE
from tests.launcher_stub.process import newest_step
from tests.patience import patient
from tests.slurm.stub_run import Scenario, StubRun, alone, side_by_side
from tests.slurm_cluster import SlurmCluster

ELSEWHERE = "--exclude=h100-[001-019]"
"""These are asked for by name, to find bad ones among them."""
VICTIMS = {"last": lambda run: run.attempt(1).placement().nodes[-1], "slow": lambda run: run.given(1)[-1],
           "first": lambda run: run.given(1)[0]}
"""The node that dies in step 12: the last one of a placement, seen by the leader, or first by Slurm (`slow`), and the
leader's own."""

pytestmark = pytest.mark.timeout(420)


def bad(*nodes: str) -> dict:
    """What the checks find."""
    return {"nodes": {node: {"gpus": {2: {"ecc_uncorrected": 4}}} for node in nodes}}


def losing_a_node(name: str, nodes: int, *words: str) -> Scenario:
    def play(slurm: SlurmCluster, folder: Path) -> StubRun:
        run = StubRun(slurm, folder, name, nodes, "checkpoint.every=5", "run.hang_min_s=200", *words, steps=20,
                      hold=12).submit(ELSEWHERE)
        run.at_step(1, 11)
        (run.attempt(1).folder / TOKEN_FILE).write_text("left by the head of a node that dies", encoding="ascii")
        victim = VICTIMS[name](run)
        slurm.kill_node(victim)
        run.go()
        if name == "last":
            slurm.wait_until(lambda: run.state["JobState"] == "COMPLETING", "the leader to see it, and to end the job")
        else:
            slurm.wait_until(lambda: vanished(run.attempt(1)) == [victim], "the others to outlive it")
        slurm.mark_down(victim)
        run.ended(2, timeout_s=300)     # a job that Slurm requeues by itself may have to wait for its two minutes
        return run

    return play


@pytest.fixture(scope="module")
def runs(slurm, tmp_path_factory) -> dict[str, StubRun]:
    """Runs when nothing follows any more: with a node that dies; a bad node and a spare; one that may go on smaller,
    one whose training then takes half, one that may not, one with fewer nodes than it may have; and allocations that
    differ from the plan."""
    return side_by_side(
        slurm, tmp_path_factory.mktemp("attempts"),
        losing_a_node("last", 3), losing_a_node("slow", 2, f"run.node_silent_s={patient(60)}"),
        losing_a_node("first", 2),
        alone("spare", 4, "placement.spare_nodes=1", steps=3, gpus=bad("h100-002"),
              options=("--nodelist=h100-[001-004]",)),
        alone("short", 4, "run.min_nodes=2", steps=3, gpus=bad("h100-007"), options=("--nodelist=h100-[005-008]",)),
        alone("halved", 3, "trainer.dp=4", "run.min_nodes=2", steps=3, gpus=bad("h100-015"),
              options=("--nodelist=h100-[014-016]",)),
        alone("broken", 3, gpus=bad("h100-010", "h100-013"), attempts=2,
              options=("--nodelist=h100-[010-012]", "--exclude=h100-[001-009,014-032]")),
        alone("below", 4, "run.min_nodes=3", "run.max_attempts=1", gpus=bad("h100-018"),
              options=("--nodes=3", "--nodelist=h100-[017-019]")),
        alone("two", 2, steps=5, options=(ELSEWHERE,)),
        alone("differs", 2, steps=2, options=(ELSEWHERE, "--nodes=3")),
        alone("fewer", 3, "run.replan=true", steps=2, options=(ELSEWHERE, "--nodes=2")),
        alone("more", 3, "run.replan=true", steps=2, options=(ELSEWHERE, "--nodes=4")))


def test_a_job_on_two_nodes_finishes_and_asks_slurm_once(runs):
    run = runs["two"]
    past, = run.history()
    assert (past.status, past.step, past.decision, past.job_id) == ("finished", 5, "done", str(run.job))
    assert run.state["JobState"] == "COMPLETED" and newest_step(run.attempt(1).checkpoints) == 5
    placement = run.attempt(1).placement()
    assert sorted(placement.nodes) == run.given(1)
    assert len(set(placement.ports.values())) == 2, "each node has its own block: these two share a host"
    assert len(run.questions(1)) <= 2, "and the step: at most three RPCs at start"


# ---- nodes that die -------------------------------------------------------------------------------------------------

def test_a_killed_node_is_found_left_out_of_a_fresh_job_and_the_run_goes_on(runs):
    run = runs["last"]
    victim = VICTIMS["last"](run)
    died, finished = run.history()
    assert (died.status, died.nodes, died.decision, died.exit_code) == ("node_failure", (victim,), "fresh", 76)
    assert died.successor != str(run.job) and victim in died.excluded
    assert (finished.status, finished.step, finished.job_id) == ("finished", 20, died.successor)
    assert victim not in run.given(2) and len(run.given(2)) == 3
    assert "from step 10" in run.text(), "it went on from a checkpoint"
    assert Ledger(run.folder / "ledger.json").excluded() == (victim,)
    folder = run.attempt(1).folder
    assert not (folder / TOKEN_FILE).exists() and stat.S_IMODE((folder / "job.sbatch").stat().st_mode) == 0o600


def test_a_node_whose_death_slurm_sees_first_is_not_dealt_with_twice(runs):
    """Slurm has put the job back into the queue: no fresh job beside it."""
    run = runs["slow"]
    victim = VICTIMS["slow"](run)
    died, finished = run.history()
    assert died.status in ("node_failure", "died") and died.nodes == (victim,) and died.successor is None
    assert (finished.status, finished.step, finished.job_id) == ("finished", 20, str(run.job))
    assert [entry.node for entry in Ledger(run.folder / "ledger.json").entries()] == [victim]


def test_the_death_of_the_leaders_node_is_inferred_by_the_next_attempt(runs):
    """Slurm requeues the job by itself; nobody was left to write an outcome."""
    run = runs["first"]
    victim = VICTIMS["first"](run)
    died, finished = run.history()
    assert (died.status, died.nodes, died.decision) == ("died", (victim,), None) and died.step == 11
    assert (finished.status, finished.step, finished.job_id) == ("finished", 20, str(run.job))
    assert run.state["Restarts"] == "1" and run.outcome(1).status == "died"
    assert [entry.node for entry in Ledger(run.folder / "ledger.json").entries()] == [victim]


# ---- nodes that the preflight refuses -------------------------------------------------------------------------------

def test_a_bad_node_found_by_preflight_is_replaced_by_the_spare(runs):
    run = runs["spare"]
    past, = run.history()
    placement = run.attempt(1).placement()
    assert past.status == "finished"
    assert sorted(placement.nodes) == ["h100-001", "h100-003", "h100-004"] and placement.spares == ()
    entry, = Ledger(run.folder / "ledger.json").entries()
    assert entry.node == "h100-002" and "4" in entry.reason and entry.evidence.endswith("h100-002/preflight.json")
    with open(entry.evidence, encoding="utf-8") as file:
        found = json.load(file)["checks"]
    assert [check["check"] for check in found if check["severity"] == "critical"] == [entry.kind]


def test_a_node_short_the_job_starts_smaller(runs):
    run = runs["short"]
    attempt = run.attempt(1)
    assert run.history()[0].status == "finished"
    assert sorted(attempt.placement().nodes) == ["h100-005", "h100-006", "h100-008"]
    assert len(attempt.placement().rollout) == attempt.config().rollout.replicas == 16, "of three rollout nodes two"
    assert "too few fit nodes for the whole plan" in run.text()


def test_where_no_engine_can_go_data_parallel_replicas_do_and_the_batch_stays(runs):
    """Planned: DP 4 on two nodes, engines on the third."""
    run = runs["halved"]
    attempt, whole = run.attempt(1), run.planned.plan
    plan, placement = attempt.plan(), attempt.placement()
    assert (run.history()[0].status, newest_step(attempt.checkpoints)) == ("finished", 3)
    assert whole.training.dp == 4 and plan.training.dp == attempt.config().trainer.dp == 2
    assert plan.batch == whole.batch and plan.batch.samples_per_step == 1024, "a replica takes twice the completions"
    assert sorted(placement.nodes) == ["h100-014", "h100-016"]
    assert [(rank.node, rank.gpu) for rank in placement.training] == [(placement.nodes[0], gpu) for gpu in range(8)]
    assert {engine.node for engine in placement.rollout} == {placement.nodes[1]}
    assert len(placement.rollout) == len(whole.rollout.engines) == 8
    assert "continuing with 8 engine(s), trainer.dp 2, 2 node(s)" in run.text()


def test_below_min_nodes_the_preflight_fails_the_job(runs):
    """Four nodes were planned, three would do and are given, two are fit."""
    run = runs["below"]
    past, = run.history()
    assert (past.status, past.nodes, past.decision, past.exit_code) == ("preflight", ("h100-018",), "stop", 5)
    assert run.state["ExitCode"] == "5:0" and not (run.attempt(1).folder / "placement.json").exists()
    assert "2 fit node(s), the plan needs 4, and run.min_nodes = 3" in past.message


def test_with_too_few_nodes_one_fresh_job_without_the_bad_node_then_it_stops(runs):
    """A broken site must not be walked through node by node."""
    run = runs["broken"]
    first, second = run.history()
    assert (first.status, first.nodes, first.decision, first.exit_code) == ("preflight", ("h100-010",), "fresh", 5)
    assert second.job_id == first.successor and {"h100-010", "h100-001", "h100-032"} <= set(first.excluded)
    assert run.given(2) == ["h100-011", "h100-012", "h100-013"], "the old job's exclusions stay"
    assert (second.status, second.nodes, second.decision, second.exit_code) == ("preflight", ("h100-013",), "stop", 5)


# ---- allocations that differ from the plan --------------------------------------------------------------------------

def test_an_allocation_that_differs_from_the_plan_is_refused_with_both_numbers(runs, slurm):
    run = runs["differs"]
    past, = run.history()
    assert run.state["ExitCode"] == "2:0" and (past.status, past.decision) == ("user_error", "stop")
    assert "planned for 2 nodes, allocated 3" in slurm.output(run.job)


@pytest.mark.parametrize(("name", "nodes"), [("fewer", 2), ("more", 4)])
def test_with_replan_another_number_of_nodes_is_planned_for(runs, name, nodes):
    """One node trains, as pinned; each of the others rolls out with an engine a GPU."""
    run = runs[name]
    past, = run.history()
    placement = run.attempt(1).placement()
    assert past.status == "finished" and sorted(placement.nodes) == sorted(run.given(1)) and len(run.given(1)) == nodes
    assert {rank.node for rank in placement.training} == {placement.nodes[0]}
    assert len(placement.rollout) == 8 * (nodes - 1) == run.attempt(1).config().rollout.replicas
    assert placement.plan_fingerprint == run.attempt(1).plan().fingerprint()
