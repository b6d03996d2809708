"""The canary, the reports and the leader that gathers them: over real files, with several clocks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.health import canary, gather
from launch.health.check import Check, ok, read_report, write_report
from launch.health.checks import clock
from launch.health.gather import gather_reports
from launch.run import node_files
from tests.health.conftest import named


class Leader:
    """Answers from a thread until the test is over; `late_s` is how long a question stays unseen, as on an NFS."""

    def __init__(self, folder, clock: Callable[[], float] = time.time, late_s: float = 0.0) -> None:
        self.answers, self.over = canary.Answers(folder, clock), threading.Event()
        self.late_s, self.folder = late_s, folder
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        while not self.over.wait(0.01):
            if list((self.folder / canary.FOLDER).glob("*.ask")) and self.late_s:
                self.over.wait(self.late_s)
                self.late_s = 0.0
            self.answers.give()

    def __enter__(self) -> Leader:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self.thread.join()


class TestCanary:
    def test_equal_clocks(self, tmp_path):
        with Leader(tmp_path):
            found = clock.check(tmp_path, "n1", 20.0)
        assert [check.name for check in found] == ["fs.canary", "fs.round_trip", "clock.skew"]
        assert {check.severity for check in found} == {"ok"} and abs(named(found, "clock.skew").value) < 0.5

    @pytest.mark.parametrize("skew_s, severity", [(3.0, "warning"), (-3.0, "warning"), (500.0, "critical")])
    def test_a_clock_that_is_wrong(self, tmp_path, skew_s, severity):
        with Leader(tmp_path, lambda: time.time() + skew_s):
            found = named(clock.check(tmp_path, "n1", 20.0), "clock.skew")
        assert found.severity == severity and found.value == pytest.approx(skew_s, abs=0.5)

    def test_clocks_agree_better_than_beats_lie_apart(self):
        """Or a healthy node would be taken for the one that died first."""
        assert clock.SKEW_CRITICAL_S + node_files.BEAT_EVERY_S < node_files.BEHIND_S

    def test_files_that_appear_late_are_no_skew(self, tmp_path):
        """What an NFS does to a question looks like a difference of half of it: the error says so."""
        with Leader(tmp_path, late_s=2.5):
            found = clock.check(tmp_path, "n1", 20.0)
        assert named(found, "clock.skew").severity == "ok"
        assert named(found, "fs.round_trip").value > 2.4

    def test_nobody_answers(self, tmp_path):
        [found] = clock.check(tmp_path, "n1", 0.2)
        assert found.severity == "critical" and "did not appear within 0.2 s" in found.evidence

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / canary.FOLDER).write_text("a file in the way")
        [found] = clock.check(tmp_path, "n1", 0.2)
        assert found.severity == "critical" and "cannot write" in found.evidence

    def test_a_question_asked_again_is_answered_again(self, tmp_path):
        answers = canary.Answers(tmp_path)
        assert answers.give() == []
        for _ in range(2):
            assert canary.ask(tmp_path, "n1", 0.0) is None
            assert answers.give() == ["n1"] and answers.give() == []

    def test_an_answer_to_an_older_question_does_not_count(self, tmp_path):
        """It may become visible late."""
        canary.ask(tmp_path, "n1", 0.0)
        canary.Answers(tmp_path, lambda: 5.0).give()
        stale = (tmp_path / canary.FOLDER / "n1.answer").read_text()

        def late() -> None:
            (tmp_path / canary.FOLDER / "n1.answer").write_text(stale)

        timer = threading.Timer(0.1, late)
        timer.start()
        assert canary.ask(tmp_path, "n1", 0.5) is None
        timer.join()

    @given(st.floats(-1e4, 1e4), *[st.floats(0, 100)] * 3)
    @settings(max_examples=50, deadline=None)
    def test_the_error_bounds_the_offset(self, offset, there, thinking, back):
        """Any delays: the true offset lies within the stated error (RFC 5905, section 8)."""
        t1 = 1000.0
        t2 = t1 + there + offset
        found = canary.measured(0.0, t1, t2, t2 + thinking, t1 + there + thinking + back)
        assert abs(found.offset_s - offset) <= found.error_s + 1e-6
        assert found.round_trip_s == pytest.approx(there + back, abs=1e-6)


class TestReports:
    def test_the_file(self, tmp_path):
        assert read_report(tmp_path / "n1") is None
        checks = [ok("gpu.count", 8, "8 GPUs"), Check("gpu.ecc", "critical", {"a": 1}, "bad", "repair")]
        file = write_report(tmp_path / "n1", "n1", checks)
        assert read_report(tmp_path / "n1") == checks
        document = json.loads(file.read_text())
        assert document["schema_version"] == 1 and document["node"] == "n1"
        assert document["checks"][1] == {"check": "gpu.ecc", "severity": "critical", "value": {"a": 1},
                                         "evidence": "bad", "remedy": "repair"}

    def test_another_version_is_refused(self, tmp_path):
        file = write_report(tmp_path, "n1", [])
        file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 9'))
        with pytest.raises(ValueError, match="schema version 9"):
            read_report(tmp_path)

    def test_gathering(self, tmp_path):
        """Two nodes ask and report, one never comes: it gets a finding, and its name is said."""
        def node(name: str) -> None:
            write_report(tmp_path / "nodes" / name, name, clock.check(tmp_path, name, 20.0))

        threads = [threading.Thread(target=node, args=(name,)) for name in ("n1", "n2")]
        for thread in threads:
            thread.start()
        found = gather_reports(tmp_path, ["n2", "n3", "n1"], 1.5)
        for thread in threads:
            thread.join()
        assert list(found) == ["n2", "n3", "n1"]
        assert named(found["n1"], "fs.canary").severity == "ok"
        assert [check.name for check in found["n3"]] == ["report.missing"]
        assert "within 2 s" in found["n3"][0].evidence or "within 1 s" in found["n3"][0].evidence

    def test_what_the_caller_watches_ends_the_wait(self, tmp_path):
        def check() -> None:
            raise RuntimeError("the step is gone")

        with pytest.raises(RuntimeError, match="the step is gone"):
            gather.gather_reports(tmp_path, ["n1"], 60.0, check=check)
