"""A rollout engine dies while it receives a sync, and again while it generates: the run goes on, and no group is lost.

Elsewhere: hangs, one death too many and every order of them (tests/rollout/test_lost_engines.py and
tests/driver/test_engines.py), the death of the only engine (test_failures.py), what the launcher makes of it
(tests/runtime/test_dismissed.py)."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from launch.exit_codes import ExitCode
from launch.run.components import dismissed
from launch.run.progress import read_progress
from tests.job.runner import Launched, launch, stop
from tests.patience import patient

DIES, PROMPTS = "rollout-1", 16
SURE_S = patient(1.5)
"""A rollout takes less."""


def core(job: Launched, number: signal.Signals) -> None:
    """Send a signal to vLLM's processes of the engine."""
    for each in job.component(DIES).needs:
        os.kill(each.pid, number)


def stop_in_mid_generation(job: Launched) -> None:
    """Stop the engine so that the step waits for it. Stopped between two rollouts, it is let go again."""
    def waits() -> float | None:
        progress = read_progress(job.attempt.folder)
        return next((span.began for span in progress.open if span.name == "rollout"), None) if progress else None

    def stopped() -> bool:
        if waits() is None:
            return False
        core(job, signal.SIGSTOP)
        began = waits()
        time.sleep(SURE_S)
        if began is not None and waits() == began:
            return True
        core(job, signal.SIGCONT)
        return False

    job.until(stopped, "a rollout that waits for the engine")


def serves_again(job: Launched, restarts: int) -> None:
    """Both engines generated groups of a step after this many restarts."""
    job.until(lambda: any(row["engines/restarts"] == restarts and row["engines/serving"] == 2
                          and row.get("engines/groups/1") for row in job.rows()), f"restart {restarts}", 100)


def warnings(job: Launched) -> list[str]:
    lines = (job.attempt.folder / "warnings.jsonl").read_text(encoding="utf-8").splitlines()
    return [warning["message"] for warning in map(json.loads, lines) if warning["code"] == "ENGINE"]


@pytest.mark.slow
def test_a_run_survives_the_deaths_of_an_engine(tmp_path):
    job = launch(tmp_path, "deaths", "run.steps=100000", "trainer.tp=1", "trainer.pp=1", "rollout.replicas=2",
                 "eval.at_end=false", "checkpoint.every=0",
                 environment={"MEGATRON_RL_FAULT": f"{DIES}:receive:3:exit"})
    job.at_step(2)
    serves_again(job, 1)

    stop_in_mid_generation(job)
    core(job, signal.SIGKILL)
    serves_again(job, 2)
    stop(job)
    assert job.end() == ExitCode.OK, job.text()
    assert job.outcome().status == "stopped"

    told = warnings(job)
    assert [line for line in told if "serves version" in line] == told[1::2] and len(told) == 4, told
    assert "lost in the sync of version 2" in told[0]
    assert len({record.process.pid for record in dismissed(job.attempt)}) == 2
    rows, groups = job.rows(), job.outcome().groups
    assert (groups.trained, groups.lost, groups.duplicated) == (len(rows) * PROMPTS, 0, 0)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:
        assert row["engines/groups/0"] + row.get("engines/groups/1", 0) == PROMPTS, row
        assert row["weights/version"] == row["step"] and row["staleness/max"] == 0
    assert rows[-1]["engines/serving"] == 2 and rows[-1]["engines/restarts"] == 2
