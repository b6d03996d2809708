"""The bound on the staleness follows a trace of divergences that was worked out by hand."""

from __future__ import annotations

import json

import pytest

from megatron_rl.algorithms.staleness import StalenessBound


def follow(bound: StalenessBound, divergences: list[float]) -> list[int]:
    """The bound after each step, for batches that are handed out `bound.now` steps ahead, as the stream does."""
    under = [bound.now] * (bound.now + 1)       # the bounds of the batches that are handed out, the next one first
    seen = []
    for divergence in divergences:
        bound.observe(divergence, under.pop(0))
        under += [bound.now] * (bound.now + 1 - len(under))
        seen.append(bound.now)
    return seen


def test_down_at_once_and_by_one_for_one_cause():
    """Batch 2 diverges: 2 -> 1. Batches 3 and 4 were handed out under 2, so they are not held against 1. Batch 5 is the
    first of bound 1: it still diverges, so 1 -> 0, and batch 6, handed out before, changes nothing. At 0 it stays."""
    trace = [.05, .21, .5, .5, .21, .9, .9, .9]
    assert follow(StalenessBound(2), trace) == [2, 1, 1, 1, 0, 0, 0, 0]


def test_up_by_one_after_20_calm_steps_and_never_over_the_configured_bound():
    """20 steps under 10 % from step 2 on: up after step 21, again after 41, then no further. 10 % is not calm, and it
    starts the count again. Neither is 20 % a reason to go down."""
    bound = StalenessBound(2)
    assert follow(bound, [.3, .15, .15, .3])[-1] == 0
    assert follow(bound, [.09] * 65) == [0] * 19 + [1] * 20 + [2] * 26
    bound = StalenessBound(1)
    assert bound.observe(.2, 1) is None
    bound.observe(.21, 1)
    assert follow(bound, [.0] * 19 + [.1] + [.0] * 20) == [0] * 39 + [1]


def test_a_change_says_what_and_why_and_no_change_is_silent():
    bound = StalenessBound(3)
    change = bound.observe(.347, 3)
    assert change == ("the bound on the staleness goes from 3 to 2 (algorithm.max_staleness = 3): the batch diverges "
                      "by 35% from the policy, more than 20%")
    assert [bound.observe(each, 3) for each in (.5, .05, None)] == [None] * 3, "an old batch, a calm one, an empty one"
    changes = [bound.observe(.01, 2) for _ in range(19)]
    assert changes[:-1] == [None] * 18 and "from 2 to 3" in changes[-1] and "20 steps in a row" in changes[-1]


def test_a_synchronous_run_stays_so():
    bound = StalenessBound(0)
    assert [bound.observe(each, 0) for each in [.9] * 3 + [.0] * 50] == [None] * 53


@pytest.mark.parametrize("killed", [3, 12, 30])
def test_it_continues_after_a_resume(killed):
    trace = [.3, .05, .3, .3] + [.05] * 60
    whole, first = StalenessBound(4), StalenessBound(4)
    expected = [(whole.observe(each, 0), whole.now)[1] for each in trace]
    for each in trace[:killed]:
        first.observe(each, 0)
    second = StalenessBound(4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [(second.observe(each, 0), second.now)[1] for each in trace[killed:]] == expected[killed:]


def test_a_bound_that_the_user_changed_holds_as_written():
    lowered = StalenessBound(2)
    lowered.observe(.5, 2)
    for most in (1, 4):
        bound = StalenessBound(most)
        bound.load_state_dict(lowered.state_dict())
        assert bound.now == most
