from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from launch.config.auto import on_this_machine
from launch.config.resolved import ResolvedConfig
from launch.config.schema import RunConfig
from launch.errors import UserError
from launch.run.metrics import attempt_dirs, metric_history, metric_rows
from megatron_rl.data.batch import Group, Prompt, Trajectory
from megatron_rl.monitor.monitor import Monitor
from megatron_rl.monitor.writers import JsonlWriter, TensorBoardWriter, WandbWriter
from tests.patience import patient


def config(**monitor) -> ResolvedConfig:
    return on_this_machine(RunConfig.model_validate({
        "run": {"name": "tiny", "steps": 10}, "model": {"path": "model"},
        "trainer": {"optimizer": {"lr": 1e-3}}, "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 4},
        "algorithm": {"group_size": 2, "prompts_per_step": 1}, "reward": {"functions": [{"function": "exact_match"}]},
        "data": {"train": "train.jsonl"}, "monitor": {"tensorboard": False, "samples_every": 2} | monitor}))


def tensorboard_scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_jsonl_is_readable_after_every_step(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"reward/mean": np.float32(0.5), "train/tokens": 7})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())  # before close: a reader may follow
    assert (row["step"], row["reward/mean"], row["train/tokens"]) == (1, 0.5, 7)
    writer.close()


def test_jsonl_holds_non_finite_numbers_as_valid_json(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"train/loss": float("nan"), "train/grad_norm": float("inf"), "train/kl": -float("inf")})
    writer.close()

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    row, = metric_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(row["train/loss"]) and row["train/grad_norm"] == math.inf and row["train/kl"] == -math.inf


def test_jsonl_appends_and_refuses_a_step_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        writer = JsonlWriter(path)
        writer.write(step, {"reward/mean": step})
        writer.close()
    before = path.read_bytes()
    writer = JsonlWriter(path)
    with pytest.raises(ValueError, match="step 2 after step 2"):
        writer.write(2, {"reward/mean": 0})
    writer.close()
    assert path.read_bytes() == before


def test_jsonl_drops_the_line_that_a_crash_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "rew')
    writer = JsonlWriter(path)
    writer.write(2, {"reward/mean": 0.2})
    writer.close()
    assert [(row["step"], row["reward/mean"]) for row in metric_rows(path)] == [(1, 0.1), (2, 0.2)]


def test_tensorboard_curve_of_a_resumed_run_has_each_step_once(tmp_path):
    for first, last, value in ((1, 5, 0.1), (4, 6, 0.9)):
        writer = TensorBoardWriter(tmp_path, first, {"config": "run: tiny"})
        for step in range(first, last + 1):
            writer.write(step, {"reward/mean": value})
        writer.close()
    assert tensorboard_scalars(tmp_path, "reward/mean") == pytest.approx(
        {1: 0.1, 2: 0.1, 3: 0.1, 4: 0.9, 5: 0.9, 6: 0.9})


def test_wandb_configured_but_missing_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import finds where the package is not installed
    with pytest.raises(UserError, match="wandb is not installed") as error:
        Monitor(config(wandb_project="grpo"), tmp_path / "tiny" / "attempts" / "1")
    assert error.value.where == "monitor.wandb_project = grpo"


@pytest.fixture
def fresh_wandb(monkeypatch):
    """wandb reads the environment once a process, and starts a service process: both end with the test. On a busy
    machine the service takes longer to start than wandb waits for it."""
    import wandb

    monkeypatch.setenv("WANDB__SERVICE_WAIT", str(patient(60)))
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")      # the file's size must not depend on the time
    yield
    wandb.teardown()


def test_wandb_without_a_key_is_a_user_error(tmp_path, monkeypatch, fresh_wandb):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(UserError, match="No API key") as error:
        WandbWriter("grpo", "tiny", tmp_path, {})
    assert "WANDB_MODE=offline" in error.value.fix


def test_wandb_offline_holds_the_curve_of_all_attempts_under_one_id(tmp_path, monkeypatch, fresh_wandb):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    for attempt in (1, 2):
        monitor = Monitor(config(wandb_project="grpo"), tmp_path / "tiny" / "attempts" / str(attempt),
                          first_step=attempt)
        monitor.log(attempt, {"reward/mean": attempt / 4})
        monitor.close()
    wandb.teardown()                        # the service writes the files: it has ended now
    files = sorted((tmp_path / "tiny" / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1
    rows = [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in records if record.HasField("history")]
    assert {row["_step"]: row["reward/mean"] for row in rows} == {1: 0.25, 2: 0.5}


def wandb_records(file: Path) -> list:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format (CRC, length, type, data)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, records = file.read_bytes(), 7, []
    assert len(data) < 32768, "more than one block: records may be split"
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a record in one piece"
        records.append(Record.FromString(data[at + 7:at + 7 + length]))
        at += 7 + length
    return records


def test_a_note_is_a_warning_like_those_of_the_detectors(tmp_path):
    attempt = tmp_path / "tiny" / "attempts" / "2"
    monitor = Monitor(config(), attempt, first_step=6)
    monitor.note("RESUMED_WITH_CHANGE", "trainer.optimizer.lr was 0.001, is 0.01")
    monitor.log(6, {"train/loss": float("inf")})
    monitor.note("LATER", "said after step 6", {"value": 2.0})
    monitor.close()
    warnings = [json.loads(line) for line in (attempt / "warnings.jsonl").read_text().splitlines()]
    assert [(warning["code"], warning["step"]) for warning in warnings] == [
        ("RESUMED_WITH_CHANGE", 5), ("NON_FINITE", 6), ("LATER", 6)]
    assert warnings[0]["message"] == "trainer.optimizer.lr was 0.001, is 0.01"
    assert warnings[2]["evidence"] == {"value": 2.0}
    assert all(warning.keys() == warnings[1].keys() for warning in warnings)


def test_monitor_writes_everything_of_an_attempt(tmp_path):
    attempt = tmp_path / "tiny" / "attempts" / "1"
    monitor = Monitor(config(tensorboard=True), attempt)
    for step in (1, 2):
        monitor.log(step, {"reward/mean": 0.5, "time/step": 1.0})
        monitor.samples(step, [group()], np.array([[0.0, 1.0]]))
    findings = monitor.log(3, {"reward/mean": float("nan")})
    monitor.close()
    assert [finding.code for finding in findings] == ["NON_FINITE"]
    assert [row["step"] for row in metric_history(attempt_dirs(tmp_path / "tiny"))] == [1, 2, 3]
    assert tensorboard_scalars(tmp_path / "tiny" / "tensorboard", "time/step") == {1: 1.0, 2: 1.0}
    warning = json.loads((attempt / "warnings.jsonl").read_text())
    assert (warning["code"], warning["step"], warning["evidence"]) == ("NON_FINITE", 3, {"reward/mean": "NaN"})
    samples = [json.loads(line) for line in (attempt / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {1, 2} and {s["reward"] for s in samples} == {0.0, 1.0}


def test_resumed_monitor_knows_what_came_before(tmp_path):
    """A reward that was 0.9 before the resume and 0.1 after it is a collapse, also for the new attempt."""
    first = Monitor(config(), tmp_path / "tiny" / "attempts" / "1")
    for step in range(1, 41):
        assert first.log(step, {"reward/mean": 0.1 if step <= 15 else 0.9}) == []
    first.close()
    second = Monitor(config(), tmp_path / "tiny" / "attempts" / "2", first_step=36)
    codes = [finding.code for step in range(36, 60) for finding in second.log(step, {"reward/mean": 0.1})]
    second.close()
    assert codes == ["REWARD_COLLAPSE"]


def group() -> Group:
    prompt = Prompt(0, np.array([1], np.int32), "2+3=", "5", {})
    return Group(prompt, tuple(Trajectory.one_turn(np.array([i], np.int32), np.zeros(1, np.float32),
                                                   np.zeros(1, np.int32), "stop", str(i)) for i in (4, 5)))
