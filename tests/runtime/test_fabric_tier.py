"""When a job measures the fabric."""

from __future__ import annotations

import time

import pytest

from launch.config.load import load_config
from launch.runtime.fabric_tier import wanted
from launch.runtime.history import PastAttempt
from tests.launch.conftest import run_yaml  # noqa: F401 (fixture)


def past(status: str, message: str = "", nodes: tuple[str, ...] = ()) -> PastAttempt:
    return PastAttempt(attempt=3, job_id="7", status=status, step_before=0, step=1, message=message, nodes=nodes,
                       at=time.time())


@pytest.mark.parametrize("last, why", [
    (None, ""), (past("hang"), "attempt 3 ended with a hang"), (past("hang", nodes=("n1",)), ""),
    (past("crash", "trainer-3: DistBackendError: NCCL watchdog"), "ended with a crash"),
    (past("crash", "trainer-3: DistBackendError: NCCL watchdog", nodes=("n1",)), "ended with a crash"),   # where it ran
    (past("crash", "rollout-0: KeyError: 'x'", nodes=("n1",)), ""), (past("crash", "Timed out waiting for rank 3"), "a crash"),
    (past("stopped"), ""), (past("node_failure", nodes=("n2",)), "")])
def test_it_follows_a_hang_that_no_node_explains(run_yaml, last, why):
    found = wanted(load_config(run_yaml).config, [past("hang"), last] if last else [])
    assert why in found and bool(found) == bool(why)


def test_it_can_be_asked_for(run_yaml):
    assert wanted(load_config(run_yaml, ["run.preflight=fabric"]).config, []) == "run.preflight = fabric"
