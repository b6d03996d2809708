"""Where a run is, read from files that launcher and job write; Slurm's word beside them."""

from __future__ import annotations

import fcntl
import json

import pytest

from launch.errors import UserError
from launch.report.diagnose.status import lock_is_held, read_status
from launch.report.diagnose.status_text import state_line, status_text
from launch.run.find import find_run
from launch.slurm.records import job_records
from tests.report.attempts import NOW, Made

NODES = [f"h100-{number:03d}" for number in range(1, 17)]


def record(state: str, reason: str = "None", **fields: str):
    values = {"JobId": "4711", "JobName": "grpo", "JobState": state, "Reason": reason, "ExitCode": "0:0",
              "Restarts": "0", "NumNodes": "16", "Partition": "batch", **fields}
    return job_records(" ".join(f"{key}={value}" for key, value in values.items()))[0]


def status(made: Made, slurm=None):
    return read_status(find_run(str(made.run)), NOW, slurm)


@pytest.fixture
def made(tmp_path) -> Made:
    return Made(tmp_path, "grpo").on_nodes(NODES)


class TestStations:
    """One run from its start to its end."""

    def test_preflight_counts_nodes_and_names_the_missing(self, made):
        made.checked(*NODES[:14])
        found = status(made)
        assert state_line(found) == "grpo         QUEUED > PREFLIGHT 14/16"
        assert found.missing == ("h100-015", "h100-016") and "h100-[015-016]" in status_text(found)

    def test_ray_counts_the_nodes_of_the_placement(self, made):
        made.checked(*NODES).placed(NODES[:15], NODES[15:]).ray(*NODES[:14])
        found = status(made)
        assert state_line(found) == "grpo         QUEUED > PREFLIGHT 16/16 > RAY 14/15"
        assert found.missing == ("h100-015",) and found.spares == ("h100-016",)

    def test_load_and_step(self, made):
        made.checked(*NODES).placed(NODES).ray(*NODES).progress(0, "start", "starting 2 vLLM engines")
        assert state_line(status(made)).endswith("> RAY 16/16 > LOAD starting 2 vLLM engines")
        made.progress(37, "train")
        assert state_line(status(made)).endswith("QUEUED > PREFLIGHT 16/16 > RAY 16/16 > LOAD > STEP 37/500 train")

    def test_time_pace_checkpoint_and_metrics(self, made):
        made.checked(*NODES).placed(NODES).ray(*NODES).progress(37, "train")
        made.checkpoint(30, 720).checkpoint(36, 1, complete=False)
        made.metrics(*({"step": step, "time/step": 80.0, "reward/mean": 0.25} for step in range(1, 37)))
        found = status(made)
        assert found.left_s == 3600 and found.step == 36 and found.needed_s == pytest.approx(464 * 80)
        assert found.checkpoint.step == 30 and found.checkpoint.age_s == pytest.approx(720)
        text = status_text(found)
        assert "1:00:00 h until the time limit" in text and "continue from the checkpoint" in text
        assert "step 30, 12:00 min old, 6 steps ago" in text and "step 36: reward 0.250, 80.00 s a step" in text

    def test_engines_that_are_out_are_told(self, made):
        (made.folder / "placement.json").write_text(json.dumps({"nodes": NODES, "rollout": [{}] * 4}))
        made.progress(3, "train").metrics({"step": 2, "engines/serving": 4.0})
        assert status(made).warnings == ()
        made.metrics({"step": 2, "engines/serving": 4.0}, {"step": 3, "engines/serving": 3.0})
        assert "warning      3 of 4 engines serve: warnings.jsonl says why" in status_text(status(made))

    def test_stopping_says_why(self, made):
        made.checked(*NODES).placed(NODES).ray(*NODES).progress(37, "train")
        (made.folder / "stop-reason.json").write_text('{"reason": "time-limit"}')
        (made.folder / "stop").touch()
        assert state_line(status(made)).endswith("STEP 37/500 train > STOPPING time-limit")

    @pytest.mark.parametrize("outcome, station", [
        ("finished", "FINISHED"), ("stopped", "STOPPED"), ("crash", "CRASHED"), ("hang", "HUNG"), ("died", "DIED"),
        ("user_error", "ERROR"), ("hardware_fault", "FAULT"), ("preflight", "UNFIT")])
    def test_every_end(self, made, outcome, station):
        found = status(made.progress(37, "train").ended(outcome, 36, "why"))
        assert found.state == station and found.over and found.step == 36 and found.left_s is None
        assert ("megatron-rl doctor grpo" in status_text(found)) == (outcome not in ("finished", "stopped"))


class TestSlurm:
    def test_queued_before_anything_was_written(self):
        found = read_status(find_run("4711"), NOW, record("PENDING", "Priority"))
        assert state_line(found) == "grpo         QUEUED" and "jobs of higher priority" in status_text(found)
        assert not found.over

    def test_a_requeue_is_said_to_be_only_waiting(self, made):
        made.progress(37, "train").ended("stopped", 36)
        found = status(made, record("PENDING", "BeginTime", Restarts="1", StartTime=str(int(NOW + 90))))
        assert found.waiting.startswith("requeued; Slurm starts a requeued job about two minutes after its end")
        assert "in 90 s" in found.waiting
        assert found.state == "QUEUED" and not found.over and "requeued 1 time" in status_text(found)

    def test_the_files_count_more_than_slurm(self, made):
        made.progress(37, "train")
        for node in NODES:
            made.beat(node, NOW - 300)
        assert status(made, record("RUNNING")).state == "STEP"
        found = status(made, record("RUNNING"))
        assert len(found.silent) == 16 and "no sign of life from h100-[001-016]" in status_text(found)
        assert status(made).state == "GONE"             # nobody knows the job any more
        assert status(made, record("NODE_FAIL")).state == "GONE"

    def test_one_silent_node_is_named(self, made):
        made.progress(37, "train").beat("h100-007", NOW - 60)
        assert status(made).silent == ("h100-007",)

    def test_a_job_that_ended_without_writing(self):
        found = read_status(find_run("4711"), NOW, record("FAILED", "JobLaunchFailure", ExitCode="0:53"))
        assert state_line(found) == "grpo         QUEUED > ENDED FAILED"
        assert "megatron-rl doctor 4711" in status_text(found)


class TestOnOneMachine:
    def test_alive_while_the_launcher_holds_the_lock(self, tmp_path):
        made = Made(tmp_path, "tiny", steps=100).progress(3, "rollout")
        lock = made.run / ".lock"
        with lock.open("w") as file:
            assert not lock_is_held(lock)
            fcntl.flock(file, fcntl.LOCK_EX)
            assert lock_is_held(lock)
            assert state_line(status(made)) == "tiny         RAY > LOAD > STEP 3/100 rollout"
        found = status(made)
        assert found.state == "GONE" and found.over and "none was written" in status_text(found)


class TestFind:
    def test_by_name_folder_attempt_and_job(self, tmp_path, made):
        Made(tmp_path, "grpo", 2).on_nodes(NODES, job="4712")
        assert find_run("grpo", tmp_path).attempt.name == "2" == find_run(str(made.run)).attempt.name
        assert find_run(str(made.folder)).attempt.name == "1" == find_run("grpo", tmp_path, attempt=1).attempt.name
        by_job = find_run("4711", tmp_path)
        assert (by_job.name, by_job.attempt.name, by_job.job) == ("grpo", "1", "4711")
        assert find_run("99", tmp_path).folder is None

    def test_errors_name_the_nearest(self, tmp_path, made):
        with pytest.raises(UserError, match="there is no run 'grpp'") as error:
            find_run("grpp", tmp_path)
        assert error.value.fix == "did you mean grpo? runs here: grpo"
        with pytest.raises(UserError, match="has no attempt 7") as error:
            find_run("grpo", tmp_path, attempt=7)
        assert error.value.fix == "attempts: 1"


def test_json_has_a_version_and_everything(made, capsys):
    from launch.cli.main import main
    made.checked(*NODES).progress(37, "train").ended("crash", 36, "trainer-3 failed first: boom")
    assert main(["status", str(made.run), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["schema_version"] == 1 and values["state"] == "CRASHED" and values["step"] == 36
    assert values["stages"][1] == {"name": "PREFLIGHT", "done": 16, "of": 16, "detail": ""}


def test_watch_ends_with_the_run(made, capsys):
    from launch.cli.main import main
    made.progress(37, "train").ended("finished", 500)
    assert main(["status", str(made.run), "--watch"]) == 0
    assert "FINISHED" in capsys.readouterr().out.splitlines()[0]


def test_no_line_is_longer_than_100_columns(tmp_path):
    made = Made(tmp_path, "a-run-with-quite-a-long-name-of-more-than-fifty-letters").on_nodes(NODES).checked(*NODES)
    made.placed(NODES).ray(*NODES).progress(37, "train", "x" * 200)
    made.metrics({"step": 36, "time/step": 80.0, "reward/mean": 1})
    found = status(made.ended("crash", 36, "words " * 100), record("FAILED"))
    assert max(len(line) for line in status_text(found).splitlines() if str(tmp_path) not in line) <= 100
