"""When a job measures the fabric, and what a measurement that failed means."""

from __future__ import annotations

import time

import pytest

from launch.cluster.file import load_cluster
from launch.config.load import load_config
from launch.health import network
from launch.health.check import Check, critical, ok, worst
from launch.health.expected import Expected
from launch.health.network_run import wanted, with_network
from launch.health.verdict import judge
from launch.run.attempt_log import PastAttempt
from launch.run.attempts import Attempt
from launch.run.node_files import Hello
from launch.slurm.profiles import Profile


def past(status: str, message: str = "", nodes: tuple[str, ...] = ()) -> PastAttempt:
    return PastAttempt(attempt=3, job_id="7", status=status, step_before=0, step=1, message=message, nodes=nodes,
                       at=time.time())


@pytest.mark.parametrize("last, why", [
    (None, ""), (past("hang"), "attempt 3 ended with a hang"), (past("hang", nodes=("n1",)), ""),
    (past("crash", "trainer-3: DistBackendError: NCCL watchdog"), "ended with a crash"),
    (past("crash", "trainer-3: DistBackendError: NCCL watchdog", nodes=("n1",)), "ended with a crash"),   # where it ran
    (past("crash", "rollout-0: KeyError: 'x'", nodes=("n1",)), ""),
    (past("crash", "Timed out waiting for rank 3"), "a crash"),
    (past("stopped"), ""), (past("node_failure", nodes=("n2",)), "")])
def test_it_follows_a_hang_that_no_node_explains(run_yaml, last, why):
    found = wanted(load_config(run_yaml).config, [past("hang"), last] if last else [])
    assert why in found and bool(found) == bool(why)


def test_it_can_be_asked_for(run_yaml):
    assert wanted(load_config(run_yaml, ["run.preflight=fabric"]).config, []) == "run.preflight = fabric"


@pytest.fixture
def measure(run_yaml, tmp_path):
    """`measure(errors, "run.preflight=fabric")`: the reports of n1 to n3, of which n3 is unfit, after a measurement
    whose rank 0 wrote these errors; and what was said."""
    def measure(errors: dict[str, str], *words: str) -> tuple[dict[str, list[Check]], list[str]]:
        attempt, said = Attempt(tmp_path / "attempts" / "4"), []
        (attempt.folder / network.FOLDER).mkdir(parents=True)
        Expected().write(attempt.folder)
        network.Result(0, 0.0, errors=errors).write(attempt.folder)
        reports = {"n1": [ok("gpu.count")], "n2": [ok("gpu.count")],
                   "n3": [critical("gpu.ecc", 4, "4 errors", "drain")]}
        hellos = {node: Hello(node, 1, "h", "10.0.0.1", "eth0", 21000, 0, 8, "", "", 0.0) for node in reports}
        found = with_network(attempt, load_config(run_yaml, words).config, [past("hang")], reports, hellos,
                            load_cluster("configs/clusters/h100x32.yaml"), Profile(), said.append, lambda: None)
        assert {member.node for member in network.Task.read(attempt.folder).members} == {"n1", "n2"}
        return found, said
    return measure


NOBODY = dict.fromkeys(("n1", "n2"), "Connection closed by peer")


def test_a_measurement_that_nobody_asked_for_and_that_fails_ends_no_run(measure):
    found, said = measure(NOBODY)
    assert said[-1] == "the network could not be measured: continuing without it"
    assert [worst(found[node]) for node in ("n1", "n2", "n3")] == ["warning", "warning", "critical"]
    verdict = judge(found, 2)
    assert verdict.ok and verdict.accepted == ("n1", "n2")


def test_one_that_was_asked_for_and_fails_does(measure):
    found, said = measure(NOBODY, "run.preflight=fabric")
    verdict = judge(found, 2)
    assert not verdict.ok and set(verdict.excluded) == {"n3"} and "continuing" not in said[-1]
    assert [check.name for check in verdict.site] == ["fabric.joined"]


def test_a_node_that_does_not_come_is_unfit_also_where_nobody_asked(measure):
    found, _ = measure({"n2": "n2#1 did not come within 200 s"})
    assert [worst(found[node]) for node in ("n1", "n2")] == ["ok", "critical"]
