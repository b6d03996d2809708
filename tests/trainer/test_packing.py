from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.errors import UserError
from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.packing import common_length, make_schedule, pack, split_for_cp, zigzag_positions

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def _batch(lengths: list[int]) -> PolicyBatch:
    """Every value tells its place on the N axis; token 0, the padding id, is sampled too."""
    n = sum(lengths)
    place_N = np.arange(n, dtype=np.float32)
    return PolicyBatch(tokens_N=(np.arange(n) % 7).astype(np.int32), lengths_B=np.array(lengths, np.int32),
                       prompt_lengths_B=np.array([(n + 1) // 2 for n in lengths], np.int32),
                       loss_weights_N=place_N + 0.25,
                       advantages_N=place_N + 0.5, behaviour_logprobs_N=-place_N, old_logprobs_N=-place_N - 0.5)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(64, 200), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_schedule_holds_every_sequence_once_and_the_same_number_of_micro_batches(
        lengths: list[int], dp: int, budget: int, multiple: int, micro_batch_multiple: int) -> None:
    schedule = make_schedule(np.array(lengths), dp, budget, multiple, micro_batch_multiple)
    counts = {len(rank) for rank in schedule}
    assert len(schedule) == dp and len(counts) == 1
    assert counts.pop() % micro_batch_multiple == 0
    assert sorted(i for rank in schedule for micro in rank for i in micro) == list(range(len(lengths)))
    sizes = [sum(-(-lengths[i] // multiple) * multiple for i in micro) for rank in schedule for micro in rank]
    assert max(sizes) <= budget
    assert common_length(schedule, np.array(lengths), multiple) == max(max(sizes), multiple)
    assert schedule == make_schedule(np.array(lengths), dp, budget, multiple, micro_batch_multiple)


def test_very_unequal_lengths_are_balanced_over_ranks() -> None:
    lengths = np.array([95] * 5 + [20] * 5)
    schedule = make_schedule(lengths, dp=2, token_budget=200)
    tokens = [sum(lengths[i] for micro in rank for i in micro) for rank in schedule]
    assert max(tokens) - min(tokens) <= 95
    # A schedule by sequence count alone puts the five long ones on one rank: 475 against 100 tokens.
    assert max(tokens) < 350


def test_sequence_over_the_budget_is_refused_with_its_padded_length() -> None:
    with pytest.raises(UserError, match=r"sequence 1 of the batch has 61 tokens, 64 with padding.*= 62"):
        make_schedule(np.array([10, 61]), 1, 62, multiple=8)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4]), st.data())
def test_packed_values_belong_to_the_next_token_of_the_same_document(lengths: list[int], multiple: int, data) -> None:
    batch = _batch(lengths)
    indices = tuple(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1)))))
    extra = data.draw(st.integers(0, 3)) * multiple
    length = sum(-(-lengths[i] // multiple) * multiple for i in indices) + extra
    micro = pack(batch, indices, multiple, length)

    assert len(micro.tokens_T) == max(length, multiple) == micro.lengths.sum()
    assert (micro.lengths % multiple == 0).all()
    expected, completion = {}, {}
    at = 0
    for i in indices:
        offset = int(batch.offsets_B1[i])
        for j in range(lengths[i] - 1):
            expected[at + j] = offset + j + 1
            completion[at + j] = j + 1 >= (lengths[i] + 1) // 2
        assert micro.tokens_T[at:at + lengths[i]].tolist() == batch.tokens_N[offset:offset + lengths[i]].tolist()
        assert micro.positions_T[at:at + lengths[i]].tolist() == list(range(lengths[i]))
        at += -(-lengths[i] // multiple) * multiple
    for t in range(len(micro.tokens_T)):
        place = expected.get(t, -1)
        assert micro.index_T[t] == place
        assert micro.completion_T[t] == completion.get(t, False)
        if place < 0:
            assert micro.weights_T[t] == 0 and micro.labels_T[t] == 0 and micro.advantages_T[t] == 0
        else:
            assert micro.labels_T[t] == batch.tokens_N[place]
            assert micro.weights_T[t] == place + 0.25 and micro.advantages_T[t] == place + 0.5
            assert micro.behaviour_logprobs_T[t] == -place and micro.old_logprobs_T[t] == -place - 0.5
    assert micro.reference_logprobs_T is None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([2, 4]))
def test_cp_ranks_share_every_document_in_mirrored_chunks(lengths: list[int], cp: int) -> None:
    micro = pack(_batch(lengths), tuple(range(len(lengths))), 2 * cp)
    shares = [split_for_cp(micro, cp, r) for r in range(cp)]
    assert {len(s.tokens_T) for s in shares} == {len(micro.tokens_T) // cp}
    assert sorted(torch.cat([s.index_T for s in shares]).tolist()) == sorted(micro.index_T.tolist())
    for r, share in enumerate(shares):
        assert share.positions_T.tolist() == zigzag_positions(micro.lengths, cp, r).tolist()
        at = 0
        for length in micro.lengths:
            chunk = length // (2 * cp)
            head, tail = share.positions_T[at:at + chunk], share.positions_T[at + chunk:at + 2 * chunk]
            assert head.tolist() == list(range(r * chunk, (r + 1) * chunk))
            assert tail.tolist() == list(range(length - (r + 1) * chunk, length - r * chunk))
            at += length // cp


def test_without_sequences_there_is_one_document_of_padding() -> None:
    micro = pack(_batch([5, 3]), (), multiple=4)
    assert micro.lengths.tolist() == [4] and not micro.weights_T.any() and (micro.index_T == -1).all()
