"""A real job on four simulated nodes: Megatron TP2 x PP2 over two of them, two vLLM engines on the others, Ray,
rewards, weight sync, checkpoints. The time limit stops it, Slurm requeues it, it goes on; in deterministic mode its
metrics are those of a job on one machine that nobody interrupted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.processes import marked
from launch.report.history import metric_rows
from launch.runtime.attempts import Attempt
from launch.runtime.components import components
from launch.runtime.node_files import NodeFiles
from launch.runtime.history import read_history
from launch.runtime.outcome import read_outcome
from launch.runtime.stop_file import stop_reason, stop_requested
from megatron_rl.trainer.checkpoint_files import complete_checkpoints
from tests.job.runner import CONFIG, launch
from tests.job.test_whole_job import TIMES
from tests.slurm_cluster import SlurmCluster

STEPS = 12
SIZES = ("trainer.vpp=1", "trainer.cp=1", "trainer.sequence_parallel=false", "trainer.recompute=none")
"""What `auto` makes of these on a cluster is not what it makes of them here."""
WORDS = (*SIZES, f"run.steps={STEPS}", "rollout.deterministic=true", "rollout.replicas=2", "checkpoint.every=0",
         "checkpoint.export=never", "eval.at_end=false", "trainer.optimizer.schedule=linear",
         "trainer.optimizer.warmup_steps=2", "reward.functions.0.function=tests.job.graders:held",
         "reward.timeout_s=200", "run.hang_min_s=400")
CLUSTER = """\
nodes: {count: 4, names: "h100-[001-004]"}
gpus: {kind: CPU-core, per_node: 2, memory_gb: 8}
network: {nics_per_node: 1, nic_gbit_per_s: 16, rails: 1}
host: {memory_gb: 16}
"""


@pytest.mark.timeout(480)
def test_a_real_job_is_stopped_by_the_time_limit_requeued_and_goes_on(slurm: SlurmCluster, tmp_path: Path):
    gate = tmp_path / "gate"
    job = _submit(slurm, tmp_path, gate)
    first, second = (Attempt(tmp_path / "runs/real/attempts" / str(number)) for number in (1, 2))

    _wait(slurm, job, lambda: len(_rows(first)) >= 2, "two steps")
    gate.touch()            # holds it in the next step until the limit has come: nothing below depends on speed
    _lower_the_limit(slurm, job)
    whole = launch(tmp_path, "whole", *WORDS, f"reward.functions.0.args={{gate: {tmp_path}/none}}")
    _every_component_is_where_it_belongs(first)
    _wait(slurm, job, lambda: stop_requested(first.folder), "the signal of the time limit")
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=10")
    gate.unlink()
    _wait(slurm, job, lambda: read_outcome(second.folder) is not None, "the end of the second attempt")
    slurm.wait_for(job, "COMPLETED", restarts=1)
    assert whole.end() == 0, whole.text()
    assert stop_reason(first.folder) == "time-limit"
    done = read_outcome(first.folder).step
    assert (read_outcome(first.folder).status, read_outcome(second.folder).status) == ("stopped", "finished")
    assert 2 <= done < STEPS and [folder.name for folder in complete_checkpoints(second.checkpoints)] == [
        f"step-{done:06d}", f"step-{STEPS:06d}"]
    assert first.plan().training == whole.attempt.plan().training
    joined = _rows(first) + _rows(second)
    assert [row["step"] for row in joined] == list(range(1, STEPS + 1))
    for ours, reference in zip(joined, whole.rows(), strict=True):
        for name in reference.keys() - {name for name in reference if name.startswith(TIMES)}:
            assert ours[name] == reference[name], f"step {reference['step']}, {name}"
        assert ours["weights/version"] == ours["step"] and ours["sync/bytes"] == reference["sync/bytes"] > 0
    assert [(past.attempt, past.status) for past in read_history(first.run_folder)] == [(1, "stopped"), (2, "finished")]
    for attempt in (first, second):
        assert marked(attempt.mark) == []


def _submit(slurm: SlurmCluster, folder: Path, gate: Path) -> int:
    cluster = folder / "four.yaml"
    cluster.write_text(CLUSTER)
    told = slurm.run(sys.executable, "-m", "launch", "launch", CONFIG, *WORDS, f"run.dir={folder}/runs",
                     "run.name=real", f"reward.functions.0.args={{gate: {gate}}}", f"cluster={cluster}",
                     "placement.training_nodes=2", "--on", "slurm", "--time", "10", "--quiet")
    return int(told.stdout)


def _wait(slurm: SlurmCluster, job: int, condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds; fails if the job ends before. Slurm is asked rarely: the cores are the job's."""
    end, asked = time.monotonic() + 240, 0.0
    while not condition():
        if time.monotonic() > asked + 5:
            state, asked = slurm.job(job)["JobState"], time.monotonic()
            going = state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
            assert going, f"{state} before {what}:\n{slurm.output(job)}"
        assert time.monotonic() < end, f"{what} did not come:\n{slurm.output(job)}"
        time.sleep(0.25)


def _lower_the_limit(slurm: SlurmCluster, job: int) -> None:
    """One to two minutes are left then: less than `--signal` asks for, so the signal comes when Slurm looks next."""
    hours, minutes, seconds = slurm.job(job)["RunTime"].split(":")
    slurm.run("scontrol", "update", f"jobid={job}", f"timelimit={60 * int(hours) + int(minutes) + 2}")


def _rows(attempt: Attempt) -> list[dict[str, float]]:
    file = attempt.folder / "metrics.jsonl"
    return metric_rows(file) if file.exists() else []


def _every_component_is_where_it_belongs(attempt: Attempt) -> None:
    placement = attempt.placement()
    assert len(placement.nodes) == 4 and len(set(placement.ports.values())) == 4
    train, other, *rollout = placement.nodes
    assert {record.name: record.node for record in components(attempt)} == {
        "driver": train, "reward-0": train, "trainer-0": train, "trainer-1": train, "trainer-2": other,
        "trainer-3": other, "rollout-0": rollout[0], "rollout-1": rollout[1]}
    for node in placement.nodes:
        assert json.loads((NodeFiles(attempt, node).folder / "ray.json").read_text())["node"] == node
        assert marked(attempt.mark, node)
