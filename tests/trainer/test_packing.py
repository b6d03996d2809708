from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.batch import PolicyBatch
from megatron_rl.data.packing import MicroBatch, pack, zigzag_positions
from megatron_rl.data.schedule import InputTokens, make_schedule
from megatron_rl.trainer.step import _packed_seq_params
from tests.trainer.harness import make_batch, make_groups

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
GROUPS = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1,
                  max_size=6)
TOOLS = st.sampled_from([0.0, 0.3, 0.9])
"""Share of the tokens after the prompt that tools wrote."""


def _numbered(batch: PolicyBatch) -> PolicyBatch:
    """Every value tells its place on the N axis."""
    place_N = np.arange(len(batch.tokens_N), dtype=np.float32)
    return replace(batch, loss_weights_N=place_N + 0.25, advantages_N=place_N + 0.5, behaviour_logprobs_N=-place_N,
                   ages_N=place_N.astype(np.int32))


def _inputs(batch: PolicyBatch, sequence: int) -> int:
    """Tokens that are fed: the prompt, and all that stands before the last sampled token."""
    start, stop = batch.offsets_B1[sequence:sequence + 2]
    sampled = [place for place in range(stop - start) if batch.sampled_N[start + place]]
    return max([int(batch.prompt_lengths_B[sequence]), *sampled[-1:]])


def _whole(micro: MicroBatch, batch: PolicyBatch, predictions: dict[int, int]) -> None:
    """`predictions`: for each place on the N axis the row that must predict it."""
    p = micro.predictions
    found = {int(index): int(row) for index, row in zip(p.index_P, p.rows_P, strict=True) if index >= 0}
    assert found == predictions
    assert len(p.index_P) == max(1, len(found)), "nothing is predicted twice"
    numbers: dict[int, int] = {}
    for i, place in enumerate(p.index_P.tolist()):
        if place < 0:
            assert p.weights_P[i] == 0 and p.labels_P[i] == 0 and p.advantages_P[i] == 0
        else:
            assert p.labels_P[i] == batch.tokens_N[place]
            assert p.weights_P[i] == place + 0.25 and p.advantages_P[i] == place + 0.5
            assert p.behaviour_logprobs_P[i] == -place
            sequence = int(np.searchsorted(batch.offsets_B1, place, side="right")) - 1
            assert p.ages_P[i] == place
            assert p.positions_P[i] == place - batch.offsets_B1[sequence] - batch.prompt_lengths_B[sequence]
            assert 0 <= p.sequence_P[i] < micro.sequences
            assert numbers.setdefault(int(p.sequence_P[i]), sequence) == sequence
    assert len(set(numbers.values())) == len(numbers), "a sequence has one number"


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4]), TOOLS, st.data())
def test_sampled_tokens_are_predicted_from_the_token_before_them(lengths: list[int], multiple: int, tools: float,
                                                                 data) -> None:
    batch = _numbered(make_batch(lengths, 7, tools=tools))
    indices = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1))))
    inputs = {i: _inputs(batch, i) for i in indices}
    extra = data.draw(st.integers(0, 3)) * multiple
    length = sum(-(-n // multiple) * multiple for n in inputs.values()) + extra
    micro = pack(batch, tuple((i,) for i in indices), multiple=multiple, length=length)

    assert len(micro.tokens_T) == max(length, multiple) == micro.documents.lengths_D.sum()
    assert (micro.documents.lengths_D % multiple == 0).all() and not micro.documents.prefix_lengths_D.any()
    at, predictions = 0, {}
    for i, n in inputs.items():
        offset = int(batch.offsets_B1[i])
        assert micro.tokens_T[at:at + n].tolist() == batch.tokens_N[offset:offset + n].tolist()
        assert micro.positions_T[at:at + n].tolist() == list(range(n))
        predictions |= {offset + j: at + j - 1 for j in range(lengths[i]) if batch.sampled_N[offset + j]}
        at += -(-n // multiple) * multiple
    _whole(micro, batch, predictions)


def _read(micro: MicroBatch, document: int) -> tuple[list[int], list[int]]:
    """Tokens and positions that a document's last query sees, in order."""
    d, start = micro.documents, int(micro.documents.lengths_D[:document].sum())
    prefix = range(d.prefix_starts_D[document], d.prefix_starts_D[document] + d.prefix_lengths_D[document])
    places = [*prefix, *range(start, start + d.lengths_D[document])]
    return micro.tokens_T[places].tolist(), micro.positions_T[places].tolist()


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 3), st.integers(24, 80), st.booleans(), st.booleans(), TOOLS)
def test_with_shared_prompts_every_trajectory_follows_its_prompt(groups: list, dp: int, budget: int, pipelined: bool,
                                                                 pad: bool, tools: float) -> None:
    batch = _numbered(make_groups(groups, 7, tools=tools))
    schedule = make_schedule(batch, dp, budget, share_prompts=True, pipelined=pipelined)
    predicted: list[int] = []
    for units in (units for rank in schedule for units in rank):
        size = InputTokens(batch).micro_batch(units)
        micro = pack(batch, units, length=budget if pad else None)
        assert len(micro.tokens_T) == (budget if pad else size)
        d = micro.documents
        ends = np.cumsum(d.lengths_D)
        expected = []
        for i in (i for unit in units for i in unit):
            start = batch.offsets_B1[i]
            inputs = batch.tokens_N[start:start + _inputs(batch, i)].tolist()
            if i in {unit[0] for unit in units} or len(inputs) > batch.prompt_lengths_B[i]:
                expected.append((inputs, list(range(len(inputs)))))
        assert [_read(micro, document) for document in range(len(d.lengths_D))][:len(expected)] == expected
        assert not micro.tokens_T[size:].any()
        rows = {}
        for index, row in zip(micro.predictions.index_P.tolist(), micro.predictions.rows_P.tolist(), strict=True):
            if index < 0:
                continue
            sequence = int(np.searchsorted(batch.offsets_B1, index, side="right")) - 1
            seen = batch.tokens_N[batch.offsets_B1[sequence]:index].tolist()
            document = int(np.searchsorted(ends, row, side="right"))
            tokens, positions = _read(micro, document)
            position = int(micro.positions_T[row])
            assert tokens[:position + 1] == seen and positions[:position + 1] == list(range(len(seen)))
            rows[index] = row
        _whole(micro, batch, rows)
        predicted += rows
    assert sorted(predicted) == np.flatnonzero(batch.sampled_N).tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([2, 4]))
def test_cp_ranks_share_every_document_in_mirrored_chunks(lengths: list[int], cp: int) -> None:
    batch = _numbered(make_batch(lengths, 7))
    units = tuple((i,) for i in range(len(lengths)))
    micro = pack(batch, units, multiple=2 * cp)
    shares = [pack(batch, units, multiple=2 * cp, cp=cp, cp_rank=r) for r in range(cp)]
    assert {len(s.tokens_T) for s in shares} == {len(micro.tokens_T) // cp}
    starts = np.cumsum(micro.documents.lengths_D) - micro.documents.lengths_D
    row_of = dict(zip(micro.predictions.index_P.tolist(), micro.predictions.rows_P.tolist(), strict=True))
    predicted: list[int] = []
    for r, share in enumerate(shares):
        assert share.positions_T.tolist() == zigzag_positions(micro.documents.lengths_D, cp, r).tolist()
        assert share.documents.lengths_D.tolist() == micro.documents.lengths_D.tolist()
        at, places = 0, []
        for start, length in zip(starts, micro.documents.lengths_D, strict=True):
            chunk = length // (2 * cp)
            head, tail = share.positions_T[at:at + chunk], share.positions_T[at + chunk:at + 2 * chunk]
            assert head.tolist() == list(range(r * chunk, (r + 1) * chunk))
            assert tail.tolist() == list(range(length - (r + 1) * chunk, length - r * chunk))
            places += [*(start + head.numpy()), *(start + tail.numpy())]
            at += length // cp
        assert share.tokens_T.tolist() == micro.tokens_T[places].tolist()
        mine = {int(i): int(row) for i, row in zip(share.predictions.index_P, share.predictions.rows_P, strict=True)
                if i >= 0}
        assert all(places[row] == row_of[index] for index, row in mine.items())
        _whole(share, batch, mine)
        number_of = dict(zip(micro.predictions.index_P.tolist(), micro.predictions.sequence_P.tolist(), strict=True))
        for index, number in zip(share.predictions.index_P.tolist(), share.predictions.sequence_P.tolist(),
                                 strict=True):
            assert index < 0 or number == number_of[index], "a sequence has the same number on all ranks"
        predicted += mine
    assert sorted(predicted) == sorted(index for index in row_of if index >= 0)


def test_documents_that_do_not_split_over_cp_are_refused() -> None:
    with pytest.raises(ValueError, match=r"documents of \[4\] tokens do not split into 2 x CP = 8 chunks"):
        pack(make_batch([5], 7), ((0,),), multiple=4, cp=4)


def test_without_sequences_there_is_one_document_of_padding_and_one_prediction_of_no_weight() -> None:
    micro = pack(make_batch([5, 3], 7), (), multiple=4)
    assert micro.documents.lengths_D.tolist() == [4]
    assert micro.predictions.weights_P.tolist() == [0.0] and micro.predictions.index_P.tolist() == [-1]
    assert micro.sequences == 1 and micro.predictions.sequence_P.tolist() == [0]


def test_one_prediction_a_row_where_logits_are_made_for_all_rows() -> None:
    batch = _numbered(make_batch([9, 4], 7))
    chosen, every = (pack(batch, ((0,), (1,)), multiple=4, predict_everywhere=x) for x in (False, True))
    assert every.predictions.rows_P.tolist() == list(range(len(every.tokens_T)))
    rows = chosen.predictions.rows_P
    for name in ("index_P", "labels_P", "weights_P", "advantages_P", "behaviour_logprobs_P", "ages_P",
                 "positions_P", "sequence_P"):
        assert torch.equal(getattr(every.predictions, name)[rows], getattr(chosen.predictions, name))
    others = np.setdiff1d(np.arange(len(every.tokens_T)), rows)
    assert not every.predictions.weights_P[others].any() and (every.predictions.index_P[others] == -1).all()


def test_rows_that_completions_share_have_no_single_prediction() -> None:
    batch = make_batch([5, 6], 7)
    with pytest.raises(ValueError, match="needs several predictions"):
        pack(batch, ((0, 1),), multiple=4, predict_everywhere=True)


def test_transformer_engine_is_not_given_documents_that_share_a_prefix(monkeypatch) -> None:
    """Its `thd` attention would read them as sequences of their own."""
    monkeypatch.setattr("megatron_rl.trainer.cpu.needed", lambda: False)
    batch = make_batch([5, 6], 7)
    params = _packed_seq_params(pack(batch, ((0,), (1,))), 1, 0)
    assert params.qkv_format == "thd" and params.cu_seqlens_q_padded is None, "it would compare them on the host"
    with pytest.raises(ValueError, match="share a prefix"):
        _packed_seq_params(pack(batch, ((0, 1),)), 1, 0)
