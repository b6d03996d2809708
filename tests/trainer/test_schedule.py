from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.schedule import InputTokens, make_schedule
from tests.trainer.harness import make_batch, make_groups

VOCAB = 50
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 25), min_size=1, max_size=6)), min_size=1,
                  max_size=8)


def _tokens(batch: PolicyBatch, unit: tuple[int, ...], multiple: int) -> int:
    """What a unit packs, counted again: prompt, then each completion but its last token."""
    first, *others = unit
    completions = [max(0, int(batch.lengths_B[i] - batch.prompt_lengths_B[i]) - 1) for i in unit]
    sizes = [int(batch.prompt_lengths_B[first]) + completions[0], *completions[1:]]
    return sum(-(-size // multiple) * multiple for size in sizes)


def _check(batch: PolicyBatch, dp: int, budget: int, multiple: int = 1, micro_batch_multiple: int = 1,
           **options: bool) -> None:
    schedule = make_schedule(batch, dp, budget, multiple, micro_batch_multiple, **options)
    counts = {len(rank) for rank in schedule}
    assert len(schedule) == dp and len(counts) == 1
    assert counts.pop() % micro_batch_multiple == 0
    sequences = [i for rank in schedule for micro in rank for unit in micro for i in unit]
    assert sorted(sequences) == list(range(len(batch.lengths_B)))
    tokens = InputTokens(batch, multiple)
    for units in (micro for rank in schedule for micro in rank):
        size = sum(_tokens(batch, unit, multiple) for unit in units)
        assert size <= budget and tokens.micro_batch(units) == (size or multiple)
    assert schedule == make_schedule(batch, dp, budget, multiple, micro_batch_multiple, **options)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(64, 200), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_schedule_holds_every_sequence_once_and_the_same_number_of_micro_batches(
        lengths: list[int], dp: int, budget: int, multiple: int, micro_batch_multiple: int) -> None:
    _check(make_batch(lengths, VOCAB), dp, budget, multiple, micro_batch_multiple)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 4), st.integers(55, 200), st.integers(1, 4), st.booleans())
def test_units_hold_every_sequence_once_and_have_one_prompt_each(groups: list, dp: int, budget: int,
                                                                 micro_batch_multiple: int, pipelined: bool) -> None:
    batch = make_groups(groups, VOCAB)
    options = {"share_prompts": True, "pipelined": pipelined}
    _check(batch, dp, budget, 1, micro_batch_multiple, **options)
    prompts = [tuple(batch.tokens_N[start:start + n])
               for start, n in zip(batch.offsets_B1[:-1], batch.prompt_lengths_B, strict=True)]
    for rank in make_schedule(batch, dp, budget, 1, micro_batch_multiple, **options):
        assert all(len({prompts[i] for i in unit}) == 1 for micro in rank for unit in micro)


def test_very_unequal_lengths_are_balanced_over_ranks() -> None:
    lengths = [95] * 5 + [20] * 5
    schedule = make_schedule(make_batch(lengths, VOCAB), dp=2, token_budget=200)
    tokens = [sum(lengths[i] for micro in rank for (i,) in micro) for rank in schedule]
    assert max(tokens) - min(tokens) <= 95
    # A schedule by sequence count alone puts the five long ones on one rank: 475 against 100 tokens.
    assert max(tokens) < 350


def test_sequence_over_the_budget_is_refused_with_its_padded_length() -> None:
    with pytest.raises(UserError, match=r"sequence 1 of the batch adds 64 tokens .* a multiple of 8.*= 62") as error:
        make_schedule(make_batch([10, 61], VOCAB), 1, 62, multiple=8)
    assert "trainer.token_budget to at least 64" in str(error.value)
    make_schedule(make_batch([10, 61], VOCAB), 1, 64, multiple=8)


def test_a_group_is_one_unit_and_neighbours_with_another_prompt_are_not() -> None:
    batch = make_groups([(6, [3, 4, 2]), (6, [3, 3]), (5, [1])], VOCAB)
    assert make_schedule(batch, 1, 100, share_prompts=True) == ((((0, 1, 2), (3, 4), (5,)),),)
    assert make_schedule(batch, 1, 100) == ((tuple((i,) for i in range(6)),),)


def test_a_prompt_that_begins_like_its_neighbour_is_another_prompt() -> None:
    """The same tokens, cut elsewhere: [7 7] answered by [7 7], and [7 7 7] answered by [7]."""
    batch = make_groups([(2, [2]), (3, [1])], VOCAB)
    batch.tokens_N[:] = 7
    assert make_schedule(batch, 1, 100, share_prompts=True) == ((((0,), (1,)),),)


def test_two_groups_with_the_same_prompt_share_it_as_neighbours_only() -> None:
    batch = make_groups([(4, [3, 3]), (4, [2, 5]), (4, [3, 1])], VOCAB)
    same = batch.tokens_N[:4]
    for start in batch.offsets_B1[[2, 3]]:
        batch.tokens_N[start:start + 4] = same
    assert make_schedule(batch, 1, 100, share_prompts=True) == ((((0, 1, 2, 3), (4, 5)),),)


def test_a_group_over_the_budget_is_split_and_each_part_has_the_prompt() -> None:
    batch = make_groups([(10, [11] * 4)], VOCAB)      # 10 + 4 x 10 tokens
    assert make_schedule(batch, 1, 50, share_prompts=True) == ((((0, 1, 2, 3),),),)
    assert make_schedule(batch, 1, 49, share_prompts=True) == ((((0, 1),), ((2, 3),)),)
    assert make_schedule(batch, 1, 29, share_prompts=True) == (tuple(((i,),) for i in range(4)),)


def test_groups_are_split_where_ranks_would_wait() -> None:
    batch = make_groups([(10, [11] * 8)] * 3, VOCAB)
    alone = make_schedule(batch, 1, 1000, share_prompts=True)
    assert sorted(len(unit) for unit in alone[0][0]) == [8, 8, 8], "nobody waits: no second copy"
    for pipelined, dp in ((False, 2), (True, 2)):
        schedule = make_schedule(batch, dp, 1000, share_prompts=True, pipelined=pipelined)
        loads = [InputTokens(batch).micro_batch(rank[0]) for rank in schedule]
        assert max(loads) <= 140 and sum(loads) == 3 * 90 + 10, "one group halved: 90 + 50 tokens each"
    one_group = make_schedule(make_groups([(10, [11] * 8)], VOCAB), 4, 1000, share_prompts=True)
    assert [len(unit) for rank in one_group for micro in rank for unit in micro] == [2, 2, 2, 2]


def test_a_prompt_longer_than_half_of_its_completions_is_not_copied_for_a_rank_that_waits() -> None:
    batch = make_groups([(20, [11, 11])], VOCAB)
    assert make_schedule(batch, 2, 100, share_prompts=True) == ((((0, 1),),), ((),))
