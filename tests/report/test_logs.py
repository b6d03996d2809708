"""Logs of all processes as one, and the first error among them."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from launch.cli.main import main
from launch.errors import UserError
from launch.report.diagnose import logs
from launch.report.diagnose.log_lines import LogFile, read, time_of
from launch.report.diagnose.logs import Filter, Follower
from launch.report.diagnose.logs_first_error import first_error, text_of
from launch.run.components import Failure, dismiss, report_lost
from tests.report.attempts import NOW, Made, stamp

TIMEOUT = ("[rank{rank}]:[E{stamp} ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
           "timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013 milliseconds before "
           "timing out.")
FOLLOWS = """\
Traceback (most recent call last):
  File "megatron_rl/trainer/step.py", line 80, in update
    loss.backward()
torch.distributed.DistBackendError: NCCL communicator was aborted on rank {rank}.
"""
CAUSE = """\
Traceback (most recent call last):
  File "megatron_rl/trainer/data.py", line 12, in pack
    raise ValueError("a packed row of 9000 tokens")
ValueError: a packed row of 9000 tokens
"""


class TestTimes:
    @pytest.mark.parametrize("line, expected", [
        ("2026-11-29 16:41:41,396 driver INFO weight sync: 4 edges", "2026-11-29 16:41:41.396"),
        ("[2026-11-29 16:41:17,320 E 24507 24507] (raylet) worker_pool.cc:586: Some", "2026-11-29 16:41:17.320"),
        ("(MainProcess pid=12801) WARNING 11-29 16:41:32 [vllm.py:1703] Enforce eager set", "2026-11-29 16:41:32"),
        ("[rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog", "2026-08-16 01:45:40.183"),
        ("slurmstepd: error: *** JOB 7 ON h100-001 CANCELLED AT 2026-11-29T18:10:00 DUE TO TIME LIMIT ***",
         "2026-11-29 18:10:00"),
        ("Params for bucket 1 (90496 elements, 90496 padded size):", None),
        ("2026-13-45 99:99:99 is no time", None)])
    def test_formats(self, line, expected):
        found = time_of(line, 2026)
        if expected is None:
            assert found is None
        else:
            whole = time.mktime(time.strptime(expected[:19], "%Y-%m-%d %H:%M:%S"))
            assert found == pytest.approx(whole + float(f"0{expected[19:] or '.0'}"), abs=1e-3)

    def test_a_line_without_a_time_stays_with_the_one_before(self, tmp_path):
        path = tmp_path / "x.log"
        path.write_text(f"before\n{stamp(NOW)} a INFO one\n  more\n{stamp(NOW - 9)} a INFO clock went back\n"
                        "\x1b[31mred\x1b[0m\n")
        lines = list(read(LogFile(path, "x")))
        assert [line.time - NOW for line in lines] == pytest.approx([0, 0, 0, 0, 0])
        assert lines[4].text == "red" and [line.number for line in lines] == [1, 2, 3, 4, 5]


@pytest.fixture
def made(tmp_path) -> Made:
    """Rank 1 fails at +10 s; ranks 0, 2 and 3 only notice."""
    made = Made(tmp_path, "grpo").on_nodes(["n1", "n2"])
    for rank in (0, 2, 3):
        glog = time.strftime("%m%d %H:%M:%S", time.localtime(NOW + 40)) + ".000000"
        made.log(f"trainer-{rank}", f"{stamp(NOW + rank)} trainer-{rank} INFO up\n"
                 + TIMEOUT.format(rank=rank, stamp=glog) + "\n" + FOLLOWS.format(rank=rank), "n1")
    made.log("trainer-1", f"{stamp(NOW + 10)} trainer-1 INFO step 37\n{CAUSE}", "n2")
    made.log("driver", f"{stamp(NOW + 1)} driver INFO begins\n{stamp(NOW + 50)} driver INFO ends\n", "n1")
    return made


class TestMerged:
    def test_by_time_over_all_files(self, made):
        lines = list(logs.merged(logs.sources(made.folder)))
        assert [line.time for line in lines] == sorted(line.time for line in lines)
        first = [line.source.name for line in lines[:5]]
        assert first == ["trainer-0", "driver", "trainer-2", "trainer-3", "trainer-1"]
        assert lines[-1].text.endswith("driver INFO ends")
        assert logs.text_of(lines[-1], 9) == f"{stamp(NOW + 50)[11:19]} driver@n1  INFO ends"

    def test_filters(self, made, capsys):
        run = str(made.run)
        assert main(["logs", run, "--role", "trainer", "--rank", "1", "--all"]) == 0
        out = capsys.readouterr().out
        assert out.count("trainer-1@n2") == 5 and "trainer-0" not in out
        assert main(["logs", run, "--node", "n2", "-n", "1"]) == 0
        assert capsys.readouterr().out.rstrip().endswith("ValueError: a packed row of 9000 tokens")
        with pytest.raises(UserError, match="no log matches --role trainer --rank 9") as error:
            logs.choose(made.folder, Filter("trainer", 9))
        assert "ranks: 0-3" in error.value.fix and "nodes: n1, n2" in error.value.fix

    def test_json(self, made, capsys):
        assert main(["logs", str(made.run), "-n", "2", "--json"]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["schema_version"] == 1 and len(values["lines"]) == 2
        assert values["lines"][-1]["component"] == "driver" and values["lines"][-1]["node"] == "n1"


class TestFollow:
    def test_new_lines_new_files_and_the_end(self, made):
        follower = Follower(made.folder, Filter())
        follower.start()
        assert follower.poll() == []
        with (made.folder / "logs" / "driver.log").open("a") as file:
            file.write(f"{stamp(NOW + 60)} driver INFO more\nhalf a li")
        made.log("rollout-0", f"{stamp(NOW + 55)} rollout-0 INFO hello\n", "n2")
        assert [line.text[-5:] for line in follower.poll()] == ["hello", " more"]
        with (made.folder / "logs" / "driver.log").open("a") as file:
            file.write("ne\n")
        assert [line.text for line in follower.poll()] == ["half a line"]

    def test_ends_with_the_attempt_and_misses_nothing(self, made):
        follower = Follower(made.folder, Filter())
        follower.start()

        def job() -> None:
            with (made.folder / "logs" / "driver.log").open("a") as file:
                for number in range(20):
                    file.write(f"line {number}\n")
                    file.flush()
            made.ended("finished", 500)

        thread = threading.Thread(target=job)
        thread.start()
        lines = [line.text for line in logs.follow(follower, 0.01)]
        thread.join()
        assert lines == [f"line {number}" for number in range(20)]


class TestFirstError:
    def test_the_cause_and_not_the_timeouts_that_follow(self, made):
        found = first_error(made.folder)
        assert found.first.component == "trainer-1" and found.first.node == "n2"
        assert found.first.summary == "ValueError: a packed row of 9000 tokens" and found.first.line == 2
        assert {each.component for each in found.others} == {"trainer-0", "trainer-2", "trainer-3"}
        text = text_of(found, made.folder)
        assert "trainer-1 on n2 at 2026-11-29 18:00:10" in text and "raise ValueError" in text
        assert "3 more, 30.0 to 30.0 s later; torch.distributed.DistBackendError: trainer-0" in text

    def test_a_timeout_that_comes_first_is_still_no_cause(self, made):
        """Clocks differ, and a rank may notice before the failing one has written its traceback."""
        made.log("trainer-2", f"{stamp(NOW + 5)} trainer-2 INFO x\n{FOLLOWS.format(rank=2)}", "n1")
        assert first_error(made.folder).first.component == "trainer-1"

    def test_recorded_errors_carry_their_exact_time(self, made):
        made.error("rollout-0", NOW + 8.5, "RuntimeError: engine broke")
        assert first_error(made.folder).first.component == "rollout-0"

    def test_an_engine_that_the_run_continued_without_explains_nothing(self, made):
        trace = "Traceback (most recent call last):\n  File \"e.py\", line 1, in f\n"
        old = f"{stamp(NOW - 90)} rollout-0 ERROR x\n{trace}RuntimeError: the first\n"
        made.log("rollout-0", old, "n1").error("rollout-0", NOW - 90, "RuntimeError: the first")
        assert first_error(made.folder).first.summary == "RuntimeError: the first"
        record = json.loads((made.folder / "errors" / "rollout-0.json").read_text())
        (made.folder / "errors" / "rollout-0.json").write_text(json.dumps({**record, "pid": 1}))
        dismiss(made.attempt, "rollout-0")
        assert first_error(made.folder).first.component == "trainer-1"
        again = f"{stamp(NOW + 1)} rollout-0 ERROR x\n{trace}RuntimeError: the second\n"
        made.log("rollout-0", old + again, "n1", started=NOW)
        assert first_error(made.folder).first.summary == "RuntimeError: the second"

    def test_an_error_both_recorded_and_logged_counts_once(self, made):
        made.error("trainer-1", NOW + 10, "ValueError: a packed row of 9000 tokens", CAUSE)
        found = first_error(made.folder)
        assert found.first.component == "trainer-1" and len(found.others) == 3

    def test_what_the_user_can_mend_explains_everything(self, made):
        made.error("driver", NOW + 90, "data.train has no column answer", users=True)
        assert first_error(made.folder).first.summary == "data.train has no column answer"

    def test_what_fails_after_the_outcome_was_ended_with_the_job(self, tmp_path):
        made = Made(tmp_path, "grpo").error("trainer-1", NOW + 10, "RuntimeError: woken by SIGTERM")
        made.error("trainer-0", NOW - 10, "DistBackendError: NCCL communicator was aborted")
        made.ended("hang", 3, "no progress")
        os.utime(made.folder / "outcome.json", (NOW, NOW))
        assert first_error(made.folder).first.component == "trainer-0"
        (made.folder / "errors" / "trainer-0.json").unlink()
        text = text_of(first_error(made.folder), made.folder)
        assert "no error was recorded or logged" in text and "1 errors of processes that were being ended" in text

    def test_only_followers(self, tmp_path):
        made = Made(tmp_path, "grpo").log("trainer-0", FOLLOWS.format(rank=0))
        made.ended("crash", 3, "trainer-1 (pid 7, node n2) died without an error of its own: killed")
        text = text_of(first_error(made.folder), made.folder)
        assert "only reports that another process was gone" in text and "trainer-1 (pid 7, node n2) died" in text

    def test_a_chain_of_exceptions_is_one_error(self, tmp_path):
        chain = CAUSE + "\nThe above exception was the direct cause of the following exception:\n\n" + CAUSE.replace(
            "ValueError: a packed row of 9000 tokens", "RuntimeError: step 37 failed")
        found = first_error(Made(tmp_path, "grpo").log("trainer-0", chain).folder)
        assert found.first.summary == "RuntimeError: step 37 failed" and found.others == ()
        assert "ValueError: a packed row" in found.first.text

    def test_a_traceback_of_vllm_with_a_prefix_on_every_line(self, tmp_path):
        prefix = "(EngineCore_DP0 pid=223840) ERROR 11-29 13:08:43 [core.py:708] "
        made = Made(tmp_path, "grpo").log("rollout-0", "".join(f"{prefix}{line}\n" for line in CAUSE.splitlines()))
        assert first_error(made.folder).first.summary == "ValueError: a packed row of 9000 tokens"

    def test_a_process_that_its_supervisor_lost(self, tmp_path):
        made = Made(tmp_path, "grpo").on_nodes(["n1"])
        report_lost(made.attempt, "n1", Failure("ray", "ray.log", "the raylet of n1 ended with status 1"))
        found = first_error(made.folder).first
        assert (found.summary, found.who) == ("the raylet of n1 ended with status 1", "ray on n1")

    def test_none(self, tmp_path):
        made = Made(tmp_path, "grpo").log("trainer-0", "all is well\n")
        assert text_of(first_error(made.folder), made.folder).startswith("no error was recorded or logged")

    def test_lines_fit(self, made, tmp_path):
        made.error("rollout-0", NOW, "RuntimeError: " + "x" * 300, CAUSE + "y" * 500)
        text = text_of(first_error(made.folder), made.folder)
        lines = [line for line in text.splitlines() if "x" * 90 not in line and str(tmp_path) not in line]
        assert max(map(len, lines)) <= 100


def test_a_run_that_has_written_nothing(tmp_path, capsys):
    (tmp_path / "new" / "attempts").mkdir(parents=True)
    assert main(["logs", "new", "--dir", str(tmp_path)]) == 2
    assert "run 'new' has no attempt yet" in capsys.readouterr().err
