"""A real job whose engine generates one batch ahead of training, with new weights at the border (docs/async.md).
Killed and resumed, it equals an uninterrupted one bit for bit. (A synchronous job that is stopped, killed and resumed:
tests/slurm/test_real_job.py.)"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from launch.exit_codes import ExitCode
from megatron_rl.data import carried
from megatron_rl.layouts.step_folder import complete_checkpoints
from tests.job.runner import TIMES, Launched, evaluation, launch, listening_addresses

CONFIG = "configs/tiny/grpo_async.yaml"
STEPS, SAVED, KILLED = 9, 4, 6
"""The first attempt writes the checkpoint of step 4 and is killed in step 6."""
GROUPS, SAMPLES = 16, 16
WORDS = (f"run.steps={STEPS}", "trainer.tp=1", "trainer.pp=1", "rollout.max_new_tokens=6", "trainer.token_budget=1024",
         f"checkpoint.every={SAVED}", "checkpoint.export=never", f"eval.every={STEPS}", "weight_sync.disk.every=3",
         "run.hang_min_s=600", "reward.timeout_s=300", "reward.functions.0.function=tests.job.graders:held",
         "rollout.deterministic=true", "rollout.swap=border", "trainer.optimizer.schedule=linear",
         "trainer.optimizer.warmup_steps=2")


def _launch(runs: Path, name: str, *, attempt: int = 1) -> Launched:
    return launch(runs, name, *WORDS, f"reward.functions.0.args={{gate: {runs}/gate}}", attempt=attempt, config=CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Launched:
    """The uninterrupted run."""
    job = _launch(tmp_path_factory.mktemp("whole"), "whole")
    assert job.end() == 0, job.text()
    return job


def test_a_batch_is_one_version_old_from_the_second_step_on(whole):
    rows = whole.rows()
    assert [row["staleness/max"] for row in rows] == [0, *[1] * (STEPS - 1)]
    assert all(row["staleness/mean"] == row["staleness/max"] for row in rows), "a border mixes no versions"
    assert {row["staleness/bound"] for row in rows} == {1} and max(row["drift/divergence"] for row in rows) < 0.2
    assert ["mismatch/kl" in row for row in rows] == [row["staleness/max"] == 0 for row in rows], "drift is no mismatch"
    assert max(row["time/rollout_hidden"] for row in rows) > 0
    for row in rows:
        parts = sum(row[f"time/{part}"] for part in ("rollout", "reward", "logprob", "train", "sync", "other"))
        assert parts == pytest.approx(row["time/step"], rel=1e-6)


def test_killed_it_equals_the_uninterrupted_run_bit_for_bit(whole, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "weights").touch()       # in the place of a folder: no version can be written
    gate = tmp_path / "gate"
    gate.write_text(str((KILLED - 1) * GROUPS * SAMPLES))       # in step 6 no score comes
    first = _launch(tmp_path, "broken")
    first.at_step(KILLED - 1)
    assert listening_addresses(first.attempt.mark) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    os.kill(first.component("driver").process.pid, signal.SIGKILL)
    assert first.end() == ExitCode.CRASH, first.text()
    _check_carried(first, SAVED)

    gate.unlink()
    second = _launch(tmp_path, "broken", attempt=2)
    assert second.end() == 0, second.text()
    joined = [*first.rows()[:SAVED], *second.rows()]
    assert [row["step"] for row in joined] == list(range(1, STEPS + 1))
    for ours, reference in zip(joined, whole.rows(), strict=True):
        for name in (name for name in reference if not name.startswith(TIMES)):
            assert ours[name] == reference[name], f"step {reference['step']}, {name}"
    assert "could not prepare the weights" in _warnings(second, "DISK")[0]
    assert evaluation(second, STEPS) == evaluation(whole, STEPS)
    groups, ahead = second.outcome().groups, (STEPS - SAVED) * GROUPS
    assert groups is not None and f"groups       {groups}\n" in second.text()
    assert (groups.trained, groups.lost, groups.duplicated) == (STEPS * GROUPS, 0, 0)
    assert groups.handed_out == groups.carried + groups.generated == ahead and groups.carried >= GROUPS
    assert groups.generated_again == 2 * GROUPS - groups.carried, "two batches were ahead of the checkpoint"


def _check_carried(job: Launched, step: int) -> None:
    """The newest checkpoint is that of `step`, with the whole next batch, which the version before generated."""
    saved = complete_checkpoints(job.attempt.checkpoints)[-1]
    assert saved.name == f"step-{step:06d}"
    following = [group for group in carried.read(saved / carried.FILE) if group.step == step + 1]
    assert {group.place for group in following} == set(range(GROUPS))
    versions = {int(version) for group in following for trajectory in group.trajectories
                for version in trajectory.weight_versions}
    assert versions == {step - 1}


def _warnings(job: Launched, code: str) -> list[str]:
    lines = (job.attempt.folder / "warnings.jsonl").read_text(encoding="utf-8").splitlines()
    return [warning["message"] for warning in map(json.loads, lines) if warning["code"] == code]
