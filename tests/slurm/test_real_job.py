"""A real job on three simulated nodes: Megatron PP2 over two of them, a vLLM engine on the third, Ray, rewards, weight
sync, checkpoints. The time limit stops it, Slurm requeues it, it goes on; one of its nodes dies, and it goes on
without; in deterministic mode its metrics are those of a job that nobody interrupted, on one machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from launch.processes import marked
from launch.run.attempt_log import read_history
from launch.run.attempts import Attempt
from launch.run.components import components
from launch.run.metrics import metric_rows
from launch.run.node_files import NodeFiles
from launch.run.outcome import read_outcome
from launch.run.stop import stop_reason, stop_requested
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.runner import CONFIG, TIMES, Launched, launch
from tests.patience import patient, still_there
from tests.slurm_cluster import SlurmCluster

SAVED, STEPS = 4, 9
"""A checkpoint every so many steps: the second comes before the end."""
A_STEP = 16 * 16
"""Completions that are scored."""
SIZES = ("trainer.tp=1", "trainer.pp=2", "trainer.vpp=1", "trainer.cp=1", "trainer.sequence_parallel=false",
         "trainer.recompute=none")
"""The least that spans nodes. What `auto` makes of the others on a cluster is not what it makes of them here."""
WORDS = (*SIZES, f"run.steps={STEPS}", "rollout.deterministic=true", f"checkpoint.every={SAVED}",
         "checkpoint.export=never", "eval.at_end=false", "trainer.optimizer.schedule=linear",
         "trainer.optimizer.warmup_steps=2", "reward.functions.0.function=tests.job.graders:held",
         f"reward.timeout_s={patient(200)}", f"run.hang_min_s={patient(400)}", f"run.node_silent_s={patient(10)}")
CLUSTER = """\
nodes: {count: 3, names: "h100-[001-003]"}
gpus: {kind: CPU-core, per_node: 2, memory_gb: 8}
network: {nics_per_node: 1, nic_gbit_per_s: 16, rails: 1}
host: {memory_gb: 16}
"""


@pytest.mark.timeout(900)
def test_a_real_job_outlives_the_time_limit_and_a_dead_node(slurm: SlurmCluster, tmp_path: Path):
    gate = tmp_path / "gate"        # holds every attempt after so many steps: nothing below depends on speed
    gate.write_text(str(2 * A_STEP))
    job = _submit(slurm, tmp_path, gate)
    first, second, third = (Attempt(tmp_path / "runs/real/attempts" / str(number)) for number in (1, 2, 3))

    _wait(slurm, job, lambda: len(_rows(first)) == 2, "two steps")
    _end_soon(slurm, job)
    whole = launch(tmp_path, "whole", *WORDS, f"reward.functions.0.args={{gate: {tmp_path}/none}}")
    _every_component_is_where_it_belongs(first)
    _wait(slurm, job, lambda: stop_requested(first.folder), "the signal of the time limit")
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=10")     # a requeued job keeps the limit
    gate.unlink()
    _wait(slurm, job, lambda: _ended(first), "the end of the first attempt")
    gate.write_text(str(3 * A_STEP))
    assert stop_reason(first.folder) == "time-limit" and _saved(first) == [3], "the step that was held is made"

    _wait(slurm, job, lambda: len(_rows(second)) == 3, "three steps of the second attempt")
    assert _saved(second) == [3, SAVED]
    victim = second.placement().nodes[1]
    assert {name for name, node in _nodes(second).items() if node == victim} == {"trainer-1", "reward-1"}
    slurm.kill_node(victim)
    _wait(slurm, job, lambda: slurm.job(job)["JobState"] != "RUNNING", "the end of the job that lost a node")
    slurm.mark_down(victim)
    _wait(slurm, job, lambda: (third.folder / "placement.json").exists(), "a third attempt without the dead node")
    gate.unlink()
    _wait(slurm, job, lambda: _ended(third), "the end of the third attempt")
    slurm.wait_until(lambda: not slurm.jobs(), "the end of the job")
    assert whole.end() == 0, whole.text()

    stopped, died, finished = read_history(first.run_folder)
    assert (stopped.status, stopped.step, stopped.decision, stopped.job_id) == ("stopped", 3, "requeue", str(job))
    assert died.status in ("node_failure", "died") and died.nodes == (victim,), died
    assert (finished.status, finished.step, _saved(third)) == ("finished", STEPS, [2 * SAVED, STEPS])
    assert slurm.job(int(finished.job_id))["JobState"] == "COMPLETED"
    assert victim not in third.placement().nodes and len(third.placement().nodes) == 3
    assert first.plan().training == whole.attempt.plan().training
    _rows_are_those_of_one_run([first, second, third], [range(1, 4), range(4, 7), range(5, STEPS + 1)], whole)
    for attempt in (first, second, third):
        assert still_there(attempt.mark) == []


def _rows_are_those_of_one_run(attempts: list[Attempt], steps: list[range], whole: Launched) -> None:
    """Each attempt goes on from the step that was saved; those that were lost are made again, with the same numbers."""
    reference = {row["step"]: row for row in whole.rows()}
    assert list(reference) == list(range(1, STEPS + 1))
    for attempt, made in zip(attempts, steps, strict=True):
        assert [row["step"] for row in _rows(attempt)] == list(made)
        for ours in _rows(attempt):
            wanted = reference[ours["step"]]
            for name in (name for name in wanted if not name.startswith(TIMES)):
                assert ours[name] == wanted[name], f"attempt {attempt.number}, step {ours['step']}, {name}"
            assert ours["weights/version"] == ours["step"] and ours["sync/bytes"] == wanted["sync/bytes"] > 0


def _submit(slurm: SlurmCluster, folder: Path, gate: Path) -> int:
    cluster = folder / "three.yaml"
    cluster.write_text(CLUSTER.replace("per_node: 2", "per_node: 1"))
    told = slurm.run(sys.executable, "-m", "launch", "launch", CONFIG, *WORDS, f"run.dir={folder}/runs",
                     "run.name=real", f"reward.functions.0.args={{gate: {gate}}}", f"cluster={cluster}",
                     "placement.training_nodes=2", "--on", "slurm", "--time", "10", "--quiet")
    return int(told.stdout)


def _wait(slurm: SlurmCluster, job: int, condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds; fails if the job ends before. Slurm is asked rarely: the cores are the job's."""
    end, asked = time.monotonic() + patient(240), 0.0
    while not condition():
        if time.monotonic() > asked + 5:
            going, asked = slurm.jobs(), time.monotonic()
            assert going, f"no job before {what}:\n{slurm.output(job)}"
        assert time.monotonic() < end, f"{what} did not come:\n{slurm.output(job)}"
        time.sleep(0.25)


def _end_soon(slurm: SlurmCluster, job: int) -> None:
    """Less is left then than `--signal` asks for: the signal comes when Slurm looks next, which it does twice a
    minute."""
    end = datetime.now() + timedelta(seconds=90)
    slurm.run("scontrol", "update", f"jobid={job}", f"endtime={end:%Y-%m-%dT%H:%M:%S}")


def _ended(attempt: Attempt) -> bool:
    return read_outcome(attempt.folder) is not None


def _saved(attempt: Attempt) -> list[int]:
    """Steps of the run's complete checkpoints."""
    return [int(folder.name.removeprefix("step-")) for folder in complete_checkpoints(attempt.checkpoints)]


def _nodes(attempt: Attempt) -> dict[str, str]:
    """Component -> its node."""
    return {record.name: record.node for record in components(attempt)}


def _rows(attempt: Attempt) -> list[dict[str, float]]:
    file = attempt.folder / "metrics.jsonl"
    return metric_rows(file) if file.exists() else []


def _every_component_is_where_it_belongs(attempt: Attempt) -> None:
    placement = attempt.placement()
    assert len(placement.nodes) == 3 and len(set(placement.ports.values())) == 3
    first, second, rollout = placement.nodes
    assert _nodes(attempt) == {
        "driver": first, "reward-0": first, "trainer-0": first, "reward-1": second, "trainer-1": second,
        "rollout-0": rollout}
    for node in placement.nodes:
        assert json.loads((NodeFiles(attempt, node).folder / "ray.json").read_text())["node"] == node
        assert marked(attempt.mark, node)
