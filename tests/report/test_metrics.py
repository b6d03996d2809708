from __future__ import annotations

import json

import pytest

from launch.errors import UserError
from launch.run.metrics import Tail, attempt_dirs, first_and_last, metric_history, read_jsonl, smoothed
from tests.report.synthetic import row, write_run


def test_newer_attempt_wins_and_what_the_older_did_past_the_resume_is_dropped(tmp_path):
    """Attempt 1 reached step 9, its checkpoint was of step 5; attempt 2 ended at step 7."""
    history = metric_history(attempt_dirs(write_run(tmp_path, (1, 9), (6, 7))))
    assert [r["step"] for r in history] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["mismatch/abs_max"] for r in history] == [1e-4] * 5 + [2e-4] * 2


def test_attempts_are_ordered_by_number_and_empty_ones_change_nothing(tmp_path):
    write_run(tmp_path, *[(n, n) for n in range(1, 11)])
    (tmp_path / "attempts" / "11").mkdir()
    assert [path.name for path in attempt_dirs(tmp_path)] == [str(n) for n in range(1, 12)]
    assert [r["step"] for r in metric_history(attempt_dirs(tmp_path))] == list(range(1, 11))


def test_a_folder_that_is_no_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        attempt_dirs(tmp_path)


def test_last_line_cut_short_is_left_out_and_a_broken_one_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError) as error:
        read_jsonl(path)
    assert error.value.where == f"{path}:2"


def test_tail_yields_each_complete_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    line = json.dumps(row(1)) + "\n"
    with path.open("a") as file:
        file.write(line + line[:20])
        file.flush()
        assert [json.loads(each)["step"] for each in tail.poll()] == [1]
        assert tail.poll() == []
        file.write(line[20:])
    assert [json.loads(each)["step"] for each in tail.poll()] == [1]


def test_first_and_last_do_not_overlap_in_a_short_run():
    assert first_and_last([1, 2, 3, 6, 9]) == (1.5, 7.5, 2)
    assert first_and_last([4]) == (4, 4, 1)
    assert first_and_last([0] * 10 + [5] * 7 + [1] * 10) == (0, 1, 10)


def test_running_mean_is_over_what_there_is():
    assert smoothed([1, 3, 5, 7], 2) == [1, 2, 4, 6]
