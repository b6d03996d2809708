"""How attempts end by themselves on a real Slurm: crashes, hangs, and what follows."""

from __future__ import annotations

import pytest

from tests.slurm.stub_run import StubRun


@pytest.fixture(scope="module")
def ends(slurm, tmp_path_factory) -> dict[str, StubRun]:
    """Runs with a fault, when nothing follows any more."""
    folder = tmp_path_factory.mktemp("ends")
    runs = {"raise": StubRun(slurm, folder, "raise", 2, fault="trainer-1:step:1:raise"),
            "exit": StubRun(slurm, folder, "exit", 2, "checkpoint.every=2", fault="trainer-1:step:5:exit"),
            "sleep": StubRun(slurm, folder, "sleep", 3, "run.max_attempts=1", fault="trainer-2:step:4:sleep")}
    for run in runs.values():
        run.submit()
    for name, attempts in (("sleep", 1), ("raise", 2), ("exit", 3)):
        runs[name].ended(attempts, timeout_s=150)
    return runs


def test_a_rank_that_crashes_at_once_is_shown_and_stops_after_the_second_attempt(ends, slurm):
    """No black hole: requeued once, then never again."""
    run = ends["raise"]
    first, second = run.history()
    assert (first.status, first.decision, first.exit_code) == ("crash", "requeue", 70)
    assert (second.status, second.decision, second.exit_code) == ("crash", "stop", 93)
    assert run.state["ExitCode"] == "93:0" and run.state["Restarts"] == "1"
    assert second.component == "trainer-1" and second.nodes == (run.node_of(2, "trainer-1"),)
    assert "trainer-1 failed first: RuntimeError: fault asked for" in slurm.output(run.job)
    assert str(run.attempt(1).logs / "trainer-1.log") in slurm.output(run.job)


def test_a_rank_that_dies_without_a_word_at_the_same_step_makes_no_progress(ends, slurm):
    run = ends["exit"]
    assert [(past.step, past.progress, past.decision) for past in run.history()] == [
        (4, True, "requeue"), (4, False, "requeue"), (4, False, "stop")]
    last = run.history()[-1]
    assert last.exit_code == 93 and (last.status, last.component) == ("crash", "trainer-1")
    assert "died without an error of its own" in slurm.output(run.job)


def test_a_hang_names_the_rank_that_never_arrived_and_its_node(ends, slurm):
    run = ends["sleep"]
    past, = run.history()
    assert (past.status, past.step, past.component, past.nodes) == (
        "hang", 3, "trainer-2", (run.node_of(1, "trainer-2"),))
    assert run.state["ExitCode"] == "75:0" and "run.max_attempts" in past.why
    assert "never arrived: trainer-2" in slurm.output(run.job)
    stacks = run.attempt(1).folder / "stacks"
    assert "faults.py" in (stacks / "trainer-2.txt").read_text()
    assert "file_barrier.py" in (stacks / "trainer-0.txt").read_text()
