"""The order of prompts: every epoch complete, a resume invisible (prime-rl#3332, #3164, Megatron-Bridge#4601)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from megatron_rl.data.sampler import PromptSampler


def draws(sampler: PromptSampler, sizes: list[int]) -> list[list[int]]:
    return [sampler.next(k) for k in sizes]


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
    source.next(9)
    used = PromptSampler(7, seed=1)
    used.next(3)
    used.load_state_dict(source.state_dict())
    assert used.next(12) == source.next(12)


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = PromptSampler(50, seed=0)
    assert sampler.next(50) != sampler.next(50)
    assert PromptSampler(50, seed=0).next(50) != PromptSampler(50, seed=1).next(50)


def test_an_order_is_the_same_on_every_machine():
    """A change of this list breaks the resume of every run in flight."""
    assert PromptSampler(8, seed=0).next(16) == [2, 4, 3, 6, 5, 0, 1, 7, 1, 3, 7, 6, 0, 4, 2, 5]


def test_without_shuffling_rows_come_in_file_order():
    assert PromptSampler(3, seed=9, shuffle=False).next(7) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(("now", "message"), [
    (PromptSampler(9, seed=0, fingerprint="aa"), "the data set changed since the checkpoint: 8 rows"),
    (PromptSampler(8, seed=0, fingerprint="bb"), "the data set changed since the checkpoint"),
    (PromptSampler(8, seed=4, fingerprint="aa"), "run.seed was 0 .* is 4 now"),
    (PromptSampler(8, seed=0, shuffle=False, fingerprint="aa"), "data.shuffle was True"),
])
def test_a_checkpoint_of_other_data_is_refused(now, message):
    """NeMo-RL#2519."""
    then = PromptSampler(8, seed=0, fingerprint="aa")
    then.next(3)
    with pytest.raises(UserError, match=message):
        now.load_state_dict(then.state_dict())
    assert now.position == 0, "a refused state must leave the sampler as it was"
