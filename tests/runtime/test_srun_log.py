"""A step that fails before it has begun: whose fault srun says it is. The texts are srun's."""

from __future__ import annotations

import pytest

from launch.config.schema import Run
from launch.run.attempts import RunFolder
from launch.runtime import endings
from launch.slurm.step import failed_nodes

LAUNCH = """\
srun: error: Task launch for StepId=7.0 failed on node n17: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: Timed out waiting for job step to complete
"""
PROLOG = "srun: error: Task launch for StepId=7.0 failed on node n3: Job prolog failed\n"
LOST = """\
srun: error: Node failure on n17
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: error: n[1-3]: tasks 0-2: Killed
"""
CONTAINER = """\
pyxis: importing docker image: example/image
slurmstepd: error: pyxis: child 4242 failed with error code: 1
slurmstepd: error: pyxis: couldn't start container
srun: error: n2: task 1: Exited with exit code 1
srun: error: n[1,3-4]: tasks 0,2-3: Terminated
"""
EVERYWHERE = "srun: error: n[1-4]: tasks 0-3: Exited with exit code 1\n"
OPTION = "srun: unrecognized option '--container-image=x'\nTry \"srun --help\" for more information\n"
NODES = ("n1", "n2", "n3", "n4", "n17")


@pytest.mark.parametrize(("text", "nodes"), [(LAUNCH, ("n17",)), (PROLOG, ("n3",)), (LOST, ("n17",)),
                                             (CONTAINER, ("n2",)), (EVERYWHERE, ("n1", "n2", "n3", "n4")), (OPTION, ()),
                                             ("srun: error: n[1-: task 0: Exited with exit code 1", ()), ("", ())])
def test_who_is_named(text, nodes):
    assert failed_nodes(text) == nodes


@pytest.mark.parametrize(("text", "status", "nodes"), [
    (LAUNCH, "node_failure", ("n17",)), (PROLOG, "node_failure", ("n3",)), (LOST, "node_failure", ("n17",)),
    (CONTAINER, "node_failure", ("n2",)), (EVERYWHERE, "user_error", ()), (OPTION, "user_error", ()),
    ("srun: error: Unable to create step for job 7: Job/step already completing or completed", "crash", ()),
    ("srun: error: Task launch for StepId=7.0 failed on node other: x", "crash", ())])
def test_whose_fault_it_is(tmp_path, text, status, nodes):
    with RunFolder(Run(name="r", dir=str(tmp_path), steps=1)) as run:
        attempt = run.new_attempt()
    log = attempt.logs / "srun.log"
    log.write_text(text, encoding="utf-8")
    outcome = endings.before_it_began(attempt, 1, log, NODES)
    assert (outcome.status, outcome.nodes, outcome.log) == (status, nodes, str(log))
    assert next(line for line in text.splitlines() if "srun:" in line) in outcome.message


def test_one_node_is_a_nodes_fault_and_all_of_them_are_not(tmp_path):
    with RunFolder(Run(name="r", dir=str(tmp_path), steps=1)) as run:
        attempt = run.new_attempt()
    log = attempt.logs / "srun.log"
    both = LAUNCH + LAUNCH.replace("n17", "n1")
    for text, nodes, status in ((LAUNCH, ("n1", "n17"), "node_failure"), (both, ("n1", "n17"), "crash"),
                                (both, NODES, "node_failure"), (CONTAINER, ("n2",), "node_failure")):
        log.write_text(text, encoding="utf-8")
        assert endings.before_it_began(attempt, 1, log, nodes).status == status
