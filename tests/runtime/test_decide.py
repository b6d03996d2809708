"""The table of what follows the end of an attempt, and the history that it reads."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.exit_codes import ExitCode
from launch.run.attempt_log import PastAttempt, chain
from launch.run.outcome import Status
from launch.run.stop import Reason
from launch.runtime.decide import CRASHES_IN_A_ROW, FAULTS_WITHOUT_PROGRESS, decide, may_start

STATUSES = typing.get_args(Status)


def past(status: Status, step: int = 5, before: int = 0, *, attempt: int = 1, job: str = "7", **values) -> PastAttempt:
    return PastAttempt(attempt=attempt, job_id=job, status=status, step=step, step_before=before, at=0.0, **values)


FURTHER, NO_FURTHER = {"step": 5, "before": 0}, {"step": 5, "before": 5}
LIMIT = past("stopped", stop_reason="time-limit", **NO_FURTHER)


@pytest.mark.parametrize(("ended", "before", "action", "code"), [
    (past("finished"), [], "done", 0),
    (past("stopped", stop_reason="user"), [], "stop", 0),
    (past("stopped", stop_reason="time-limit"), [], "requeue", 0),
    (past("stopped", stop_reason="preemption"), [], "requeue", 0),
    (past("stopped", stop_reason="signal"), [], "requeue", 0),
    (past("stopped", stop_reason="time-limit", **NO_FURTHER), [], "requeue", 0),
    (past("stopped", stop_reason="time-limit", **NO_FURTHER), [LIMIT], "stop", 93),
    (past("stopped", stop_reason="time-limit", **NO_FURTHER), [past("stopped", stop_reason="preemption", **NO_FURTHER)],
     "requeue", 0),
    (past("stopped", stop_reason="preemption", **NO_FURTHER),
     [past("stopped", stop_reason="preemption", **NO_FURTHER)] * 5,
     "requeue", 0),
    (past("stopped", stop_reason="signal", **NO_FURTHER), [LIMIT], "requeue", 0),
    (past("hardware_fault", nodes=("n3",)), [], "fresh", 76),
    (past("node_failure", nodes=("n3",)), [], "fresh", 76),
    (past("node_failure"), [], "requeue", 76),
    (past("crash", **FURTHER), [], "requeue", 70),
    (past("crash", **FURTHER), [past("crash")], "requeue", 70),
    (past("crash", **FURTHER), [past("crash"), past("hang")], "stop", 70),
    (past("crash", **FURTHER), [past("crash"), past("hang"), past("stopped")], "requeue", 70),
    (past("crash", **NO_FURTHER), [], "requeue", 70),
    (past("crash", **NO_FURTHER), [past("crash", **NO_FURTHER)], "stop", 93),
    (past("crash", **NO_FURTHER), [past("crash", **FURTHER)], "requeue", 70),
    (past("hang", **FURTHER), [], "requeue", 75),
    (past("hang", **NO_FURTHER), [past("hang", **NO_FURTHER)], "stop", 93),
    (past("preflight", 0, nodes=("n3",)), [], "fresh", 5),
    (past("preflight", 0, nodes=("n3",)), [past("preflight", 0, nodes=("n4",))], "stop", 5),
    (past("preflight", 0), [], "stop", 5),
    (past("user_error"), [], "stop", 2),
    (past("interrupted"), [], "stop", 130),
    (past("interrupted", stop_reason="user"), [], "stop", 130),
    (past("interrupted", stop_reason="time-limit"), [], "requeue", 130),
    (past("interrupted", stop_reason="preemption", **NO_FURTHER), [], "requeue", 130),
    (past("interrupted", stop_reason="time-limit", **NO_FURTHER), [LIMIT], "stop", 93),
])
def test_the_table(ended, before, action, code):
    decision = decide(ended, before, max_attempts=20)
    assert (decision.action, int(decision.exit_code)) == (action, code), decision.why


def test_bad_nodes_are_left_out_of_the_fresh_job():
    assert decide(past("node_failure", nodes=("n3", "n5")), [], 20).exclude == ("n3", "n5")


def test_a_node_on_which_it_crashes_twice_is_left_out():
    first = past("crash", nodes=("n1", "n3"))
    again = decide(past("hang", 9, 5, nodes=("n3", "n4")), [first], 20)
    assert (again.action, again.exclude) == ("fresh", ("n3",))
    assert decide(past("hang", 9, 5, nodes=("n4",)), [first], 20).action == "requeue"


def test_a_crash_that_comes_back_at_the_same_step_makes_no_progress_however_long_it_took():
    """Resumed at 20, crashed at 30, resumed at 20, crashed at 30: the second got no further."""
    first = past("crash", step=30, before=20)
    second = past("crash", step=30, before=30)
    assert first.progress and not second.progress
    third = decide(past("crash", step=30, before=30), [first, second], 20)
    assert (third.action, third.exit_code) == ("stop", ExitCode.NO_PROGRESS)


def test_node_failures_without_a_step_do_not_eat_the_cluster():
    lost = [past("node_failure", 0, nodes=(f"n{number}",)) for number in range(FAULTS_WITHOUT_PROGRESS)]
    assert decide(lost[-1], lost[:-1], 20).exit_code == ExitCode.NO_PROGRESS
    assert decide(lost[-1], lost[:-2], 20).action == "fresh"
    assert decide(past("node_failure", 9, 5, nodes=("n9",)), lost, 20).action == "fresh", "it had come further"


def test_the_cap_counts_attempts_that_fail_or_make_no_step():
    failed = [past("node_failure", number + 1, number, nodes=("n1",)) for number in range(4)]
    assert decide(past("node_failure", 9, 5, nodes=("n1",)), failed, 6).action == "fresh"
    last = decide(past("node_failure", 9, 5, nodes=("n1",)), failed, 5)
    assert (last.action, last.exit_code) == ("stop", 76) and "has had its 5 attempts" in last.why
    assert may_start(failed, 4).exit_code == ExitCode.NO_PROGRESS and may_start(failed, 5) is None


@pytest.mark.parametrize("reason", ["time-limit", "preemption", "signal"])
def test_a_run_of_many_time_limits_or_preemptions_goes_on_as_long_as_it_makes_steps(reason):
    before = [past("stopped", number + 1, number, stop_reason=reason) for number in range(60)]
    assert decide(past("stopped", 61, 60, stop_reason=reason), before, 20).action == "requeue"
    assert may_start(before, 20) is None
    failed = [past("node_failure", 61, 60, nodes=("n1",))] * 19
    assert may_start([*before, *failed], 20) is None, "the count began anew with the last step made in order"


def test_one_attempt_means_one():
    """As a point of a sweep has: whoever submits the sweep again goes on."""
    decision = decide(past("stopped", 9, 0, stop_reason="time-limit"), [], 1)
    assert (decision.action, decision.exit_code) == ("stop", ExitCode.UNFINISHED)


def test_preemptions_without_a_step_end_with_the_cap_and_not_as_a_success():
    """Jobs that depend on the success of this one must not start on weights that are half trained."""
    before = [past("stopped", stop_reason="preemption", **NO_FURTHER)] * 19
    decision = decide(past("stopped", stop_reason="preemption", **NO_FURTHER), before, 20)
    assert (decision.action, decision.exit_code) == ("stop", ExitCode.UNFINISHED)


def test_a_job_that_slurm_restarts_again_and_again_without_a_step_is_refused():
    died = [past("died", 0, nodes=("n1",))] * FAULTS_WITHOUT_PROGRESS
    assert may_start(died, 20).exit_code == ExitCode.NO_PROGRESS
    assert may_start(died[1:], 20) is None
    assert may_start([past("died", 5, 0), *died[1:]], 20) is None, "one of them had come further"


def test_a_job_that_slurm_ended_with_all_its_nodes_at_once_has_lost_none():
    """A preemption without notice: no node fell silent before the others."""
    ended = [past("died", 0)] * 10
    assert may_start(ended, 20) is None and may_start(ended, 10).exit_code == ExitCode.NO_PROGRESS
    assert decide(past("node_failure", 0, nodes=("n1",)), ended, 20).action == "fresh"


attempts = st.builds(lambda status, step, before, nodes, reason: past(status, step, before, nodes=tuple(nodes),
                                                                      stop_reason=reason),
                     st.sampled_from(STATUSES), st.integers(0, 3), st.integers(0, 3),
                     st.sets(st.sampled_from(["n1", "n2"])), st.sampled_from([None, *typing.get_args(Reason)]))


@settings(max_examples=200, deadline=None)
@given(attempts, st.lists(attempts, max_size=6))
def test_nothing_goes_on_for_ever(ended, before):
    """Whatever the past: the same failure again and again without a step ends soon, and always within the cap, which
    is all that ends preemptions and signals."""
    history, cap = list(before), 50
    again = ended.model_copy(update={"step_before": ended.step})
    outside = (ended.status in ("stopped", "interrupted") and ended.stop_reason in ("preemption", "signal")
               or ended.status == "died" and not ended.nodes)
    most = cap if outside else FAULTS_WITHOUT_PROGRESS + CRASHES_IN_A_ROW + 1
    for _ in range(most):
        decision = decide(again, history, max_attempts=cap)
        if decision.ends_the_run:
            return
        history.append(again)
    pytest.fail(f"{ended.status} was restarted {most} times without a step")


def test_caps_count_what_happened_without_a_person():
    a = past("node_failure", attempt=1, job="7", successor="8")
    b = past("crash", attempt=2, job="8")
    c = past("stopped", attempt=3, job="8")
    older = past("crash", attempt=1, job="5")
    assert chain([older, a, b, c], "8") == [a, b, c]
    assert chain([older, a, b, c], "9") == [], "submitted by hand: a person has looked at it"
