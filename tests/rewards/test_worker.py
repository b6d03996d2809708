"""RewardWorker: a failed reward ends the run with the sample saved, or the sample is left out if so configured."""

from __future__ import annotations

import json

import numpy as np
import pytest

from launch.config.schema import Reward as RewardConfig
from launch.errors import UserError
from megatron_rl.rewards.sample import Sample
from megatron_rl.rewards.worker import RewardWorker

GRADER = "tests.rewards.graders:by_completion"


@pytest.fixture
def worker_of(tmp_path):
    workers = []

    def start(**changes) -> RewardWorker:
        section = {"functions": [{"function": GRADER}], "timeout_s": 2.0, **changes}
        workers.append(RewardWorker(RewardConfig.model_validate(section), tmp_path))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()
        worker.close()


def test_stop_names_function_sample_and_cause_and_saves_the_sample(worker_of, tmp_path):
    sample = Sample("raise", "1", prompt="what?", columns={"level": np.int64(3)}, completion_tokens=4,
                    prompt_index=12, sample_index=3)
    with pytest.raises(UserError) as caught:
        worker_of().score([Sample("fine", "1"), sample])
    message = str(caught.value)
    assert f"reward '{GRADER}' fails on prompt 12, sample 3: KeyError: 'no such unit'" in message
    assert "reward.on_error: zero" in message
    (path,) = (tmp_path / "failed_samples").iterdir()
    assert str(path) in message
    saved = json.loads(path.read_text())
    assert saved["status"] == "error" and saved["function"] == GRADER
    assert saved["sample"]["completion"] == "raise" and saved["sample"]["prompt"] == "what?"
    assert saved["sample"]["prompt_index"] == 12 and "3" in saved["sample"]["columns"]["level"]


def test_a_hang_is_told_from_a_failure(worker_of):
    with pytest.raises(UserError, match="hangs on prompt -1, sample 0: no answer within 2 s") as caught:
        worker_of().score([Sample("hang", "1", sample_index=0)])
    assert "reward.timeout_s (now 2)" in caught.value.fix


def test_zero_keeps_three_outcomes_apart(worker_of, tmp_path):
    worker = worker_of(functions=[{"function": GRADER}, {"function": "exact_match", "args": {"anywhere": "text"}}],
                       on_error="zero")
    samples = [Sample("fine", "fine"), Sample("fine", "other"), Sample("raise", "1"), Sample("hang", "1")]
    scores = worker.score(samples)
    assert [score.status for score in scores] == ["ok", "ok", "error", "timeout"]
    assert [score.total for score in scores] == pytest.approx([2.0, 1.0, np.nan, np.nan], nan_ok=True)
    assert {json.loads(path.read_text())["status"] for path in (tmp_path / "failed_samples").iterdir()} == {
        "error", "timeout"}


@pytest.mark.parametrize("on_error", ["stop", "zero"])
def test_what_an_engine_aborted_is_not_graded(worker_of, tmp_path, on_error):
    samples = [Sample("raise", "1", finish_reason="abort"), Sample("fine", "fine"),
               Sample("hang", "1", finish_reason="abort")]
    scores = worker_of(on_error=on_error).score(samples)
    assert [score.status for score in scores] == ["aborted", "ok", "aborted"]
    assert [score.total for score in scores] == pytest.approx([np.nan, 1.0, np.nan], nan_ok=True)
    assert not (tmp_path / "failed_samples").exists()


def test_a_closed_worker_says_so(worker_of):
    worker = worker_of()
    worker.close()
    with pytest.raises(RuntimeError, match="before start, or after close"):
        worker.score([Sample("fine", "1")])
