"""The order of prompts: every epoch complete, a resume invisible (prime-rl#3332, #3164, Megatron-Bridge#4601)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from megatron_rl.data.sampler import PromptSampler


def draws(sampler: PromptSampler, sizes: list[int]) -> list[list[int]]:
    return [sampler.pick(k) for k in sizes]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), shuffle=st.booleans())
def test_every_epoch_visits_every_row_once(n, sizes, shuffle):
    rows = [row for batch in draws(PromptSampler(n, seed=3, shuffle=shuffle), sizes) for row in batch]
    assert len(rows) == sum(sizes)
    for start in range(0, len(rows) - n + 1, n):
        assert sorted(rows[start:start + n]) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), before=st.lists(st.integers(1, 12), max_size=6),
       after=st.lists(st.integers(1, 12), min_size=1, max_size=4), shuffle=st.booleans())
def test_a_resume_draws_what_the_uninterrupted_run_draws(n, before, after, shuffle):
    """Also in a later epoch, where a sampler that forgets it repeats the first (Megatron-Bridge#4601)."""
    unbroken = PromptSampler(n, seed=5, shuffle=shuffle)
    draws(unbroken, before)
    state = json.loads(json.dumps(unbroken.state_dict()))
    expected = draws(unbroken, after)

    resumed = PromptSampler(n, seed=5, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert draws(resumed, after) == expected
    assert resumed.state_dict() == unbroken.state_dict()


def test_a_sampler_that_was_used_before_loading_still_resumes_rightly():
    """prime-rl#3332: an iterator made before the state was loaded starts over."""
    source = PromptSampler(7, seed=1)
    source.pick(9)
    used = PromptSampler(7, seed=1)
    used.pick(3)
    used.load_state_dict(source.state_dict())
    assert used.pick(12) == source.pick(12)


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = PromptSampler(50, seed=0)
    assert sampler.pick(50) != sampler.pick(50)
    assert PromptSampler(50, seed=0).pick(50) != PromptSampler(50, seed=1).pick(50)


def test_an_order_is_the_same_on_every_machine():
    """A change of this list breaks the resume of every run in flight."""
    assert PromptSampler(8, seed=0).pick(16) == [2, 4, 3, 6, 5, 0, 1, 7, 1, 3, 7, 6, 0, 4, 2, 5]


def test_without_shuffling_rows_come_in_file_order():
    assert PromptSampler(3, seed=9, shuffle=False).pick(7) == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), batch=st.integers(1, 4), used=st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_rows_that_are_put_back_are_drawn_next_and_in_their_order(n, batch, used):
    """The stream of used rows is that of a sampler which draws no reserve."""
    sampler, drawn = PromptSampler(n, seed=2), []
    for count in used:
        rows = sampler.pick(batch + 6)
        drawn += rows[:batch + count]
        sampler.put_back(rows[batch + count:])
        state = json.loads(json.dumps(sampler.state_dict()))
        sampler = PromptSampler(n, seed=2)
        sampler.load_state_dict(state)
    assert drawn == PromptSampler(n, seed=2).pick(len(drawn))


@pytest.mark.parametrize(("now", "message"), [
    (PromptSampler(8, seed=4), "run.seed was 0 .* is 4 now"),
    (PromptSampler(8, seed=0, shuffle=False), "data.shuffle was True"),
])
def test_a_checkpoint_of_another_order_is_refused(now, message):
    """NeMo-RL#2519."""
    then = PromptSampler(8, seed=0)
    then.pick(3)
    with pytest.raises(UserError, match=message):
        now.load_state_dict(then.state_dict())
    assert now.position == 0, "a refused state must leave the sampler as it was"
